"""A loop of one's own on accelerate: label counts, accumulation, a schedule, evaluation, exact resume.

python examples/accelerate_loop.py shards/ Qwen/Qwen2.5-VL-3B-Instruct --out runs/a
torchrun --nproc-per-node 8 examples/accelerate_loop.py shards/ Qwen/Qwen2.5-VL-3B-Instruct --out runs/a --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from vlm_stream import StreamLoader
from vlm_stream.integrations.accelerate import loss_scale, register


def train(
    accelerator: Accelerator,
    loader: StreamLoader,
    model: Any,
    folder: Path,
    *,
    learning_rate: float = 1e-5,
    save_after: int | None = None,
    resume: bool = False,
) -> Any:
    """Train an epoch, save after each `save_after` optimizer steps; return the prepared model."""
    total_steps = len(loader) // loader.options.micro_batches
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    # Not prepared: accelerate would step it once for each process.
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))
    model, optimizer = accelerator.prepare(model, optimizer)
    register(accelerator, loader)
    accelerator.register_for_checkpointing(schedule)
    if resume:
        accelerator.load_state(str(max(folder.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))))
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            inputs = {name: value.to(accelerator.device) for name, value in batch.items()}
            loss = model(**inputs, use_cache=False).loss * loss_scale(accelerator, loader)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
            if save_after and schedule.last_epoch % save_after == 0:
                accelerator.save_state(str(folder / f"step-{schedule.last_epoch}"))
    return model


@torch.no_grad()
def evaluate(accelerator: Accelerator, loader: StreamLoader, model: Any) -> float:
    """Return the mean loss over all labels of all ranks."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for batch in loader:
        labels = int((batch["labels"][:, 1:] != -100).sum())
        count = torch.tensor(max(labels, 1))
        inputs = {name: value.to(accelerator.device) for name, value in (batch | {"num_items_in_batch": count}).items()}
        sums += torch.tensor([model(**inputs, use_cache=False).loss * count, labels], device=accelerator.device)
    model.train()
    loss, labels = accelerator.reduce(sums).tolist()
    return float(loss / labels)


def main() -> None:
    """Train from the command line."""
    from transformers import AutoModelForImageTextToText

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("model", help="name or folder of a model with its processor")
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--pack-size", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=given.micro_batches)
    data = {"processor": given.model, "pack_size": given.pack_size, "fake_image": True}
    loader = StreamLoader(given.shards, micro_batches=given.micro_batches, num_workers=2, **data)
    model = AutoModelForImageTextToText.from_pretrained(given.model)
    model = train(accelerator, loader, model, given.out, save_after=100, resume=given.resume)
    loss = evaluate(accelerator, StreamLoader(given.shards, train=False, **data), model)
    accelerator.print(f"loss after training: {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
