"""The examples for torch, as trainers under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from examples import torch_ddp, torch_fsdp2

if TYPE_CHECKING:
    from vlm_stream import StreamLoader
    from vlm_stream.testing.conformance import Run


def ddp(run: Run) -> None:
    dist.init_process_group("gloo")
    run_example(torch_ddp, run, run.model(), run.loader(), run.eval_loader())


def fsdp2(run: Run) -> None:
    dist.init_process_group("gloo")
    mesh, model = torch_fsdp2.make_mesh(), run.model()
    torch_fsdp2.shard(model, mesh)
    run_example(torch_fsdp2, run, model, run.loader(device_mesh=mesh), run.eval_loader(device_mesh=mesh))


def run_example(example: Any, run: Run, model: Any, loader: StreamLoader, held_out: StreamLoader) -> None:
    run.tell(length=len(loader))
    how = {"learning_rate": run.learning_rate, "save_after": run.save_after, "resume": run.resume}
    run.tell(total_steps=example.train(model, loader, run.folder, **how))
    losses = {example.evaluate(model, held_out) for _ in range(run.evaluations)}
    assert len(losses) <= 1
    dist.destroy_process_group()
