"""FSDP2 and torch.distributed.checkpoint with our own loop: a named mesh, a loader inside the checkpoint, exact resume.

torchrun --nproc-per-node 2 examples/torch_fsdp2.py SHARDS PROCESSOR_FOLDER --out runs/fsdp2 [--resume]

A checkpoint may be loaded by another number of ranks: torch cuts the model anew, and the loader deals the rest of the
epoch anew. In torchtitan the mesh of the loader is `parallel_dims.get_mesh("batch")`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from vlm_stream import StreamLoader


def make_mesh() -> DeviceMesh:
    """Return a mesh of all ranks that says which of its dimensions are data-parallel."""
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "dp_shard"))


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Shard each layer, then what is left."""
    for layer in [*model.model.language_model.layers, *model.model.visual.blocks]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(
    model: Any, loader: StreamLoader, folder: Path, *, learning_rate: float, save_after: int | None, resume: bool
) -> int:
    """Train an epoch, save once after `save_after` optimizer steps; return how many steps the epoch has."""
    accumulation, total_steps = loader.options.micro_batches, loader.steps_per_epoch
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))
    if resume:
        state = checkpoint(model, optimizer, schedule, loader)
        dcp.load(state, checkpoint_id=folder / "checkpoint")  # (2) schedule and loader take what is theirs
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for number, batch in enumerate(loader, 1):
        # The batch knows the labels of the whole step, over all ranks. FSDP averages over ranks: make it a sum.
        loss = model(**batch, use_cache=False).loss * loader.world.size
        loss.backward()
        if number % accumulation:
            continue
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if schedule.last_epoch == save_after:
            dcp.save(checkpoint(model, optimizer, schedule, loader), checkpoint_id=folder / "checkpoint")
    return total_steps


def checkpoint(model: Any, optimizer: Any, schedule: LambdaLR, loader: StreamLoader) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint saves and loads; schedule and loader are asked by it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state, "schedule": schedule, "data": loader}  # (1)


@torch.no_grad()
def evaluate(model: Any, loader: StreamLoader) -> float:
    """Return the mean loss over all labels of all ranks. Every rank has as many batches: FSDP wants all of them."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        batch["num_items_in_batch"] = 1  # the loss is then a sum
        labels = (batch["labels"][:, 1:] != -100).sum()
        total += torch.stack([model(**batch, use_cache=False).loss.double(), labels])
    dist.all_reduce(total)
    model.train()
    return float(total[0] / total[1])


def main() -> None:
    """Read the command line and train a tiny model."""
    from transformers import AutoProcessor

    from vlm_stream.testing import build_tiny_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("processor")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--save-after", type=int, default=100)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = make_mesh()
    processor = AutoProcessor.from_pretrained(arguments.processor)
    model = build_tiny_model("qwen2_5_vl", processor)
    shard(model, mesh)
    # fake_image: every rank runs its vision tower in every micro-batch, which DDP and FSDP want.
    options: dict[str, Any] = {"processor": processor, "pack_size": 2048, "fake_image": True, "device_mesh": mesh}
    with StreamLoader(arguments.shards, micro_batches=2, num_workers=1, **options) as loader:
        train(
            model, loader, arguments.out, learning_rate=0.01, save_after=arguments.save_after, resume=arguments.resume
        )
    with StreamLoader(arguments.shards, train=False, **options) as loader:
        loss = evaluate(model, loader)
    if dist.get_rank() == 0:
        print(f"loss after training: {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
