"""The example for torchdata as a trainer under test, and what torch's own DataLoader gives to two ranks."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from examples import torchdata_loader
from vlm_stream import VLMStream

if TYPE_CHECKING:
    from vlm_stream.testing.conformance import Run


def ddp(run: Run) -> None:
    dist.init_process_group("gloo")
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata calls it
    model, stream = run.model(), run.loader().stream
    run.tell(length=len(stream))
    total = torchdata_loader.train(
        model,
        stream,
        run.folder,
        learning_rate=run.learning_rate,
        save_after=run.save_after,
        resume=run.resume,
    )
    run.tell(total_steps=total)
    model.eval()
    held_out = DataLoader(run.eval_loader().stream, batch_size=None, num_workers=1)
    for _ in range(run.evaluations):
        for batch in held_out:
            with torch.no_grad():
                model(**batch, use_cache=False)
    dist.destroy_process_group()


def start_methods(run: Run) -> None:
    """Write which samples this rank gets, by how the workers were started."""
    stream = VLMStream(str(run.data / "shards"), processor=str(run.data / "processor"), **run.options)
    dist.init_process_group("gloo")
    taken = {}
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context=method)
        taken[method] = [name for batch in loader for row in batch["refs"] for name in row]
    (run.folder / f"taken-{dist.get_rank()}.json").write_text(json.dumps(taken))
    dist.destroy_process_group()
