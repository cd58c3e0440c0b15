"""DistributedDataParallel with our own loop: label counts, accumulation, a schedule, evaluation, exact resume.

torchrun --nproc-per-node 2 examples/torch_ddp.py SHARDS PROCESSOR_FOLDER --out runs/ddp [--resume]
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from vlm_stream import StreamLoader


def train(
    model: Any, loader: StreamLoader, folder: Path, *, learning_rate: float, save_after: int | None, resume: bool
) -> int:
    """Train an epoch, save once after `save_after` optimizer steps; return how many steps the epoch has."""
    accumulation, total_steps = loader.options.micro_batches, loader.steps_per_epoch
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))
    step = 0
    if resume:
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        loader.load_state_dict(saved["data"])  # (1) the same text for every rank, and for any number of ranks
        step = saved["step"]
    for number, batch in enumerate(loader, 1):
        last = number % accumulation == 0
        with contextlib.nullcontext() if last else parallel.no_sync():
            # The batch knows the labels of the whole step, over all ranks. DDP averages over ranks: make it a sum.
            loss = parallel(**batch, use_cache=False).loss * loader.world.size
            loss.backward()
        if not last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        step += 1
        if step == save_after and dist.get_rank() == 0:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": loader}  # (2)
            saved = {name: part.state_dict() for name, part in parts.items()} | {"step": step}
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(saved, folder / "checkpoint.tmp")
            (folder / "checkpoint.tmp").rename(folder / "checkpoint.pt")
    return total_steps


@torch.no_grad()
def evaluate(model: Any, loader: StreamLoader) -> float:
    """Return the mean loss over all labels of all ranks. Ranks may have different numbers of batches."""
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
    processor = AutoProcessor.from_pretrained(arguments.processor)
    model = build_tiny_model("qwen2_5_vl", processor)
    # fake_image: every rank runs its vision tower in every micro-batch, which DDP and FSDP want.
    options: dict[str, Any] = {"processor": processor, "pack_size": 2048, "fake_image": True}
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
