"""A small LightningModule that notes which samples each optimizer step was made of."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from vlm_stream import StreamLoader
from vlm_stream.integrations.lightning import StreamCallback, step_loss

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


EPOCHS = {"max_epochs": 2}
STEPS = {"max_steps": 14, "max_epochs": -1}
WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's use of torch's pytree
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # the resumed run saves nothing
    pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=None"),  # what OnExceptionCheckpoint brings about
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint"),
]
"""Of Lightning, for `pytestmark`."""


class FailedError(Exception):
    """What a training step raises in the middle of a run."""


class Noting(LightningModule):
    def __init__(self, *, fail_at: int | None = None, with_schedule: bool = True) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1024, 1)
        self.fail_at, self.with_schedule = fail_at, with_schedule
        self.steps: list[Any] = []
        """Of each optimizer step the samples of its batches."""
        self.epochs: list[int] = []
        self.total_steps: float | None = None
        self._batches: list[Any] = []
        self._num_batches = 0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if self._num_batches == self.fail_at:
            raise FailedError
        self._num_batches += 1
        self._batches.append(names(batch))
        loss = self.embedding(batch["input_ids"] % 1024).mean()
        return step_loss(self, loss, batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps.append(self._batches)
        self.epochs.append(self.current_epoch)
        self._batches = []

    def configure_optimizers(self) -> Any:
        if self.with_schedule:
            self.total_steps = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Validating(Noting):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.validated: dict[int, list[Any]] = {}
        """Of each validation, by the optimizer steps before it, the samples of its batches."""

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.setdefault(self.global_step, []).append(names(batch))


def names(batch: dict[str, Any]) -> list[tuple[str, ...]]:
    return [tuple(name) for row in batch["refs"] for name in row]


def open_loader(folder: Any, **options: Any) -> StreamLoader:
    """Return a loader of 11, 12, 11, 11 batches in its first epochs."""
    defaults = {"pack_size": 1900, "window": 16, "pixels": False, "with_refs": True}
    return StreamLoader(str(folder / "shards"), processor=str(folder / "processor"), **defaults | options)


def fit(module: LightningModule, *data: Any, ckpt_path: Any = None, datamodule: Any = None, **options: Any) -> Trainer:
    """Train; return the trainer. A `FailedError` of the module ends it."""
    saves = any(isinstance(callback, Checkpoint) for callback in options.get("callbacks", ()))
    trainer = Trainer(**QUIET | {"enable_checkpointing": saves} | options)
    with contextlib.suppress(FailedError):
        trainer.fit(module, *data, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer


@functools.cache
def whole_run(data: Any, micro_batches: int, endless: bool) -> list[Any]:
    """The steps of such a run, by our own loop."""
    loader = open_loader(data, micro_batches=micro_batches, epochs=None if endless else 1)
    rounds = 1 if endless else EPOCHS["max_epochs"]
    batches = itertools.chain.from_iterable(loader for _ in range(rounds))
    taken = [
        names(batch) for batch in itertools.islice(batches, STEPS["max_steps"] * micro_batches if endless else None)
    ]
    return [taken[first : first + micro_batches] for first in range(0, len(taken), micro_batches)]


def run_of(endless: bool) -> dict[str, int]:
    return STEPS if endless else EPOCHS


def checkpoints(folder: Any) -> list[tuple[Any, int]]:
    """Return the checkpoints in a folder with the optimizer steps before them."""
    found = sorted(folder.glob("*.ckpt"))
    assert found
    return [(path, torch.load(path, weights_only=True)["global_step"]) for path in found]


def resume(data: Any, path: Any, micro_batches: int = 1, endless: bool = False, **options: Any) -> Noting:
    module = Noting()
    loader = open_loader(data, micro_batches=micro_batches, epochs=None if endless else 1)
    options = {"callbacks": [StreamCallback()], "accumulate_grad_batches": micro_batches} | run_of(endless) | options
    fit(module, loader, ckpt_path=path, **options)
    return module
