"""transformers' Trainer on shards: train, evaluate, save, resume.

python examples/transformers_trainer.py shards/ Qwen/Qwen2.5-VL-3B-Instruct --out runs/a
torchrun --nproc-per-node 8 examples/transformers_trainer.py shards/ Qwen/Qwen2.5-VL-3B-Instruct --out runs/a --resume
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForImageTextToText, TrainingArguments

from vlm_stream import StreamLoader
from vlm_stream.integrations.transformers import StreamTrainer

if TYPE_CHECKING:
    from pathlib import Path


def train(
    loader: StreamLoader,
    model: Any,
    folder: Path | str,
    *,
    eval_loader: StreamLoader | None = None,
    resume: bool = False,
    callbacks: list[Any] | None = None,
    **settings: Any,
) -> StreamTrainer:
    """Train a model on a loader; `settings` are those of `TrainingArguments`."""
    arguments = TrainingArguments(
        output_dir=str(folder), gradient_accumulation_steps=loader.options.micro_batches, **settings
    )
    trainer = StreamTrainer(
        model=model, args=arguments, train_dataset=loader, eval_dataset=eval_loader, callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("model", help="name or folder of a model with its processor")
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--pack-size", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    data = {"processor": given.model, "pack_size": given.pack_size, "fake_image": True}
    trainer = train(
        StreamLoader(given.shards, micro_batches=given.micro_batches, num_workers=2, **data),
        AutoModelForImageTextToText.from_pretrained(given.model),
        given.out,
        eval_loader=StreamLoader(given.shards, train=False, **data),
        resume=given.resume,
        num_train_epochs=given.epochs,
        save_steps=100,
        logging_steps=10,
        report_to="none",
    )
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"loss after training: {metrics['eval_loss']:.4f}")
    trainer.end()


if __name__ == "__main__":
    main()
