"""DDP over torchdata's StatefulDataLoader: its workers, our batches, exact resume.

torchrun --nproc-per-node 2 examples/torchdata_loader.py SHARDS PROCESSOR_FOLDER --out runs/torchdata [--resume]
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
from torchdata.stateful_dataloader import StatefulDataLoader

from vlm_stream import VLMStream


def train(
    model: Any, stream: VLMStream, folder: Path, *, learning_rate: float, save_after: int | None, resume: bool
) -> int:
    """Train an epoch, save once after `save_after` optimizer steps; return how many steps the epoch has."""
    loader = StatefulDataLoader(stream, batch_size=None, num_workers=2)  # (1) batches are made by the stream
    accumulation = stream.options.micro_batches
    total_steps = len(loader) // accumulation
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))
    step = 0
    if resume:
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        loader.load_state_dict(saved["data"])  # (2) the same for every rank, for as many workers as before
        step = saved["step"]
    for number, batch in enumerate(loader, 1):
        last = number % accumulation == 0
        with contextlib.nullcontext() if last else parallel.no_sync():
            # The batch knows the labels of the whole step, over all ranks. DDP averages over ranks: make it a sum.
            loss = parallel(**batch, use_cache=False).loss * stream.world.size
            loss.backward()
        if not last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        step += 1
        if step == save_after and dist.get_rank() == 0:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": loader}  # (3)
            saved = {name: part.state_dict() for name, part in parts.items()} | {"step": step}
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(saved, folder / "checkpoint.tmp")
            (folder / "checkpoint.tmp").rename(folder / "checkpoint.pt")
    return total_steps


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
    # fake_image: every rank runs its vision tower in every micro-batch, which DDP and FSDP want.
    stream = VLMStream(arguments.shards, processor=processor, pack_size=2048, micro_batches=2, fake_image=True)
    steps = train(
        build_tiny_model("qwen2_5_vl", processor),
        stream,
        arguments.out,
        learning_rate=0.01,
        save_after=arguments.save_after,
        resume=arguments.resume,
    )
    if dist.get_rank() == 0:
        print(f"trained {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
