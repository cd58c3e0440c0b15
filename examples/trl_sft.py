"""TRL's SFTTrainer on shards, packed, with or without LoRA.

python examples/trl_sft.py shards/ Qwen/Qwen2.5-VL-3B-Instruct --out runs/a --lora
torchrun --nproc-per-node 8 examples/trl_sft.py shards/ Qwen/Qwen2.5-VL-3B-Instruct --out runs/a --resume
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForImageTextToText
from trl import SFTConfig

from vlm_stream import StreamLoader
from vlm_stream.integrations.trl import StreamSFTTrainer

if TYPE_CHECKING:
    from pathlib import Path


def train(
    loader: StreamLoader,
    model: Any,
    folder: Path | str,
    *,
    eval_loader: StreamLoader | None = None,
    peft_config: Any = None,
    resume: bool = False,
    callbacks: list[Any] | None = None,
    **settings: Any,
) -> StreamSFTTrainer:
    """Train a model on a loader; `settings` are those of `SFTConfig`."""
    config = SFTConfig(output_dir=str(folder), gradient_accumulation_steps=loader.options.micro_batches, **settings)
    trainer = StreamSFTTrainer(
        model=model,
        args=config,
        train_dataset=loader,
        eval_dataset=eval_loader,
        peft_config=peft_config,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("model", help="name or folder of a model with its processor")
    parser.add_argument("--out", default="runs/sft")
    parser.add_argument("--pack-size", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--lora", action="store_true", help="needs peft")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    data = {"processor": given.model, "pack_size": given.pack_size, "fake_image": True}
    lora = None
    if given.lora:
        from peft import LoraConfig

        lora = LoraConfig(target_modules=["q_proj", "v_proj"])
    trainer = train(
        StreamLoader(given.shards, micro_batches=given.micro_batches, num_workers=2, **data),
        AutoModelForImageTextToText.from_pretrained(given.model),
        given.out,
        eval_loader=StreamLoader(given.shards, train=False, **data),
        peft_config=lora,
        resume=given.resume,
        num_train_epochs=given.epochs,
        bf16=torch.cuda.is_available(),
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
