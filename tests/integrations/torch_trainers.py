"""The examples for torch, as trainers under test."""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

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


def ddp_command(run: Run) -> None:
    run_command(torch_ddp, run)


def fsdp2_command(run: Run) -> None:
    run_command(torch_fsdp2, run)


def run_command(example: Any, run: Run) -> None:
    sys.argv = ["example", run.sources, str(run.data / "processor"), "--out", str(run.folder), "--save-after", "1"]
    sys.argv += ["--resume"] if run.resume else []
    example.main()


def dcp_worlds(run: Run) -> None:
    """Save on 2 of 3 ranks, load on 2, 1 and 3 of them; write down the samples that each rank gets."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    taken: dict[str, list[Any]] = {}

    def open_loader(size: int) -> StreamLoader:
        return run.loader(rank=rank, world_size=size, with_refs=True, num_workers=0)

    def take(name: str, loader: StreamLoader, most: int | None = None) -> StreamLoader:
        for batch in itertools.islice(loader, most):
            taken.setdefault(name, []).extend(key for row in batch["refs"] for key in row)
        return loader

    def save(name: str, loader: StreamLoader, size: int) -> None:
        dcp.save({"data": loader}, checkpoint_id=run.folder / name, process_group=groups[size])

    def load(name: str, loader: StreamLoader, size: int) -> StreamLoader:
        dcp.load({"data": loader}, checkpoint_id=run.folder / name, process_group=groups[size])
        return loader

    if rank < 2:
        save("new-by-2", open_loader(2), 2)
        save("used-by-2", take("2", open_loader(2), 5), 2)  # in the middle of a step
    for size in (2, 1, 3):
        dist.barrier()
        if rank >= size:
            continue
        take(f"new, 2 to {size}", load("new-by-2", open_loader(size), size))
        take(f"2 to {size}", load("used-by-2", open_loader(size), size))
        taken.pop("before", None)
        take(f"2 to {size}, used", load("used-by-2", take("before", open_loader(size), 3), size))
        taken.pop("before")
    if rank < 1:
        save("used-by-1", take("2 to 1, some", load("used-by-2", open_loader(1), 1), 3), 1)
    dist.barrier()
    take("2 to 1 to 3", load("used-by-1", open_loader(3), 3))
    (run.folder / f"taken-{rank}.json").write_text(json.dumps(taken))
    dist.destroy_process_group()
