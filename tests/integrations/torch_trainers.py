"""The examples for torch, as trainers under test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from examples import torch_ddp

if TYPE_CHECKING:
    from vlm_stream.testing.conformance import Run


def ddp(run: Run) -> None:
    dist.init_process_group("gloo")
    model, loader = run.model(), run.loader()
    run.tell(length=len(loader))
    total = torch_ddp.train(
        model,
        loader,
        run.folder,
        learning_rate=run.learning_rate,
        save_after=run.save_after,
        resume=run.resume,
    )
    run.tell(total_steps=total)
    held_out = run.eval_loader()
    losses = {torch_ddp.evaluate(model, held_out) for _ in range(run.evaluations)}
    assert len(losses) <= 1
    dist.destroy_process_group()
