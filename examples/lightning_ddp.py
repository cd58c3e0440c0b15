"""Lightning on several devices: label counts, accumulation, a schedule, evaluation, exact resume.

python examples/lightning_ddp.py SHARDS PROCESSOR_FOLDER --out runs/lightning [--devices 2] [--resume]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import LambdaLR

from vlm_stream import StreamLoader
from vlm_stream.integrations.lightning import StreamCallback, step_loss


class Finetune(LightningModule):
    """A transformers model with SGD and a learning rate that falls to 0."""

    def __init__(self, model: Any, learning_rate: float) -> None:
        """Keep the model; from_pretrained returns it in eval mode, and Lightning leaves it there."""
        super().__init__()
        self.model = model and model.train()
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """Return the loss of the whole optimizer step, over all devices."""
        loss = self.model(**batch, use_cache=False).loss
        return step_loss(self, loss, batch)  # (1) Lightning averages: make it a sum

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # noqa: ARG002
        """Log the mean loss over all labels of this device."""
        labels = int((batch["labels"][:, 1:] != -100).sum())
        loss = self.model(**batch | {"num_items_in_batch": max(labels, 1)}, use_cache=False).loss
        self.log("val_loss", loss, batch_size=labels, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Count the steps of all epochs: the loader knows its length."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate)
        total_steps = self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make_trainer(folder: Path, *, micro_batches: int, save_every: int, **options: Any) -> Trainer:
    """Return a trainer that saves the model, the optimizer and the place in the stream."""
    return Trainer(
        accelerator="cpu",
        accumulate_grad_batches=micro_batches,
        callbacks=[
            StreamCallback(),  # (2) checkpoints say what was trained on
            ModelCheckpoint(folder, every_n_train_steps=save_every, save_last=True),
        ],
        logger=False,
        **{"strategy": "ddp", "max_epochs": 1} | options,
    )


def main() -> None:
    """Read the command line and train a tiny model."""
    from transformers import AutoProcessor

    from vlm_stream.testing import build_tiny_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("processor")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--pack-size", type=int, default=2048)
    arguments = parser.parse_args()
    processor = AutoProcessor.from_pretrained(arguments.processor)
    # fake_image: every device runs its vision tower in every micro-batch, which DDP and FSDP want.
    options: dict[str, Any] = {"processor": processor, "pack_size": arguments.pack_size, "fake_image": True}
    loader = StreamLoader(arguments.shards, micro_batches=2, num_workers=1, **options)
    held_out = StreamLoader(arguments.shards, train=False, **options)
    module = Finetune(build_tiny_model("qwen2_5_vl", processor), learning_rate=0.01)
    trainer = make_trainer(
        arguments.out, micro_batches=2, save_every=arguments.save_every, devices=arguments.devices, log_every_n_steps=1
    )
    trainer.fit(module, loader, held_out, ckpt_path="last" if arguments.resume else None)
    trainer.validate(module, held_out)


if __name__ == "__main__":
    main()
