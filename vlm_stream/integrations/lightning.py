"""Lightning: a callback that makes checkpoints say what was trained on, and the loss of a whole optimizer step.

>>> trainer = Trainer(callbacks=[StreamCallback()], accumulate_grad_batches=4)        # doctest: +SKIP
>>> trainer.fit(module, StreamLoader(..., micro_batches=4), ckpt_path="last")         # doctest: +SKIP

and in `training_step`: `return step_loss(self, self.model(**batch).loss, batch)`.

Lightning finds the callback by itself where this package is installed (the entry point
`lightning.pytorch.callbacks_factory`); to name it does no harm. It leaves trainers without a `StreamLoader` alone.

What Lightning does by itself, and what is done about it here:

- It saves the loader's state as it stands, although it holds a batch ahead of a stream without a length, and although
  an exception leaves a batch or a part of an accumulated step untrained. Here the state, and the count of batches that
  belongs to it, are those after the last optimizer step.
- It loads that state only in the middle of an epoch, and not at all where `estimated_stepping_batches` was asked.
  Here it is always loaded, and before the schedule asks for a length.
- It divides the loss by `accumulate_grad_batches` and averages gradients over ranks: see `step_loss`.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vlm_stream.errors import ConfigError, StateError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    raise ConfigError(
        "Lightning is not installed, so its plug cannot be used; install it with: pip install 'vlm-stream[trainers]'"
    ) from error

if TYPE_CHECKING:  # Lightning imports this file where nobody has a loader
    from vlm_stream.loader import StreamLoader

__all__ = ["StreamCallback", "callbacks", "step_loss"]

_COUNT = "num_items_in_batch"
_KEY = "vlm_stream"


def callbacks() -> list[Callback]:
    """Return the callbacks that Lightning adds to every trainer."""
    return [StreamCallback()]


def step_loss(module: LightningModule, loss: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return the loss whose gradients, after Lightning's averages, are those of the optimizer step as one batch.

    Args:
        module: The LightningModule.
        loss: Sum over this batch's labels / `num_items_in_batch`: what a transformers model makes of `model(**batch)`.
        batch: The batch. Without `num_items_in_batch` (label counts are not known) the loss comes back as it is: the
            mean of means that is usual in Lightning.
    """
    trainer = module.trainer
    callback = _leader(trainer)
    if callback is not None:
        callback.loss_is_scaled = True
    return loss * _averages(trainer) if _COUNT in batch else loss


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a fit stands after an optimizer step."""

    step: int
    states: list[dict[str, Any] | None]
    """One for each stateful loader; None: it is not a `StreamLoader`."""
    progress: dict[str, Any]
    """Lightning's count of batches, as it saves it at the end of a batch."""
    logged: int


class StreamCallback(Callback):
    """Keep Lightning's checkpoints exact for the `StreamLoader`s it trains on, and refuse what would not be exact."""

    def __init__(self) -> None:
        self.loss_is_scaled = False
        """Whether `step_loss` was called in this training step."""
        self._mark: _Mark | None = None
        self._known: list[StreamLoader] = []
        self._batch: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the fit before this one."""
        if stage == "fit":
            self._mark, self._known, self._batch = None, [], None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Set up the loaders now and load their states: what asks for a length later gets that of the resumed run."""
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        states = loops.get("state_dict", {}).get("combined_loader", [])
        if trainer.state.fn != "fit" or _leader(trainer) is not self or not any(_KEY in state for state in states):
            return
        fit_loop: Any = trainer.fit_loop
        fit_loop.setup_data()
        if fit_loop._combined_loader is None:  # nothing is trained: limit_train_batches=0
            return
        fit_loop._combined_loader._load_state_dicts(states)
        progress = loops["epoch_loop.batch_progress"]
        begun = 0 if progress["is_last_batch"] else progress["current"]["processed"]
        self._begin(trainer, begun)
        if progress["is_last_batch"] and math.isfinite(fit_loop.max_batches):
            # Lightning takes the epoch for ended if it has as many batches as the next one, which may have others.
            offset = int(fit_loop.max_batches) - progress["total"]["ready"]
            progress["current"] |= {name: count + offset for name, count in progress["total"].items()}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse settings that would not be exact; remember where the fit starts."""
        if _leader(trainer) is not self:
            return
        loaders = _stream_loaders(trainer.fit_loop)
        for loader in loaders:
            _check_training(trainer, loader)
        self._carry_over(trainer)
        self._know(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the batches of this epoch: they may be a few more or less than those of the last."""
        if self._mark is None:
            return
        self._carry_over(trainer)
        _count(trainer, begun=0)
        self._mark = replace(self._mark, progress=_progress(trainer, of_new_epoch=True))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look whether the loss of this batch will have to be that of a whole step."""
        if self._mark is not None and self._has_others(trainer):  # resumed at the end of an epoch, and reloaded
            self._known = _stream_loaders(trainer.fit_loop)
            _count(trainer, begun=batch_idx + 1)
        for loader in self._known:
            _check_accumulation(trainer, loader)
        self._batch, self.loss_is_scaled = batch if self._known else None, False

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Refuse a loss that counts the labels of the whole step and would be averaged again."""
        batch, averages = self._batch, _averages(trainer)
        if averages > 1 and not self.loss_is_scaled and isinstance(batch, Mapping) and _COUNT in batch:
            raise ConfigError(
                f"the batch carries {_COUNT}, with which a transformers model divides by the labels of the whole step, "
                f"and Lightning divides by {averages} again (accumulate_grad_batches and ranks), so gradients would be "
                f"{averages} times too small; return vlm_stream.integrations.lightning.step_loss(self, loss, batch) "
                f"from training_step, or take it out of the batch: batch.pop('{_COUNT}')"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Remember this place if the optimizer made a step here."""
        self._batch = None
        if self._mark is not None and trainer.global_step != self._mark.step:
            self._mark = _mark(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on to the next epoch of the stream, and give back what was taken of it and made no step."""
        if self._mark is not None:
            if trainer.global_step != self._mark.step:
                self._mark = _mark(trainer)
            _fetched_ahead(trainer).clear()
            _load(self._known, self._mark)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the position after the last optimizer step instead of what the loaders have handed out."""
        if not self._known and _leader(trainer) is self and trainer.state.fn == "fit":
            self._know(trainer)  # saved before the first batch
        if self._mark is None:
            return
        if trainer.global_step != self._mark.step:  # by a callback before this one, after the step
            self._mark = _mark(trainer)
        mark, loops = self._mark, checkpoint["loops"]["fit_loop"]
        saved = loops["state_dict"]["combined_loader"]
        saved[:] = [ours or theirs for ours, theirs in zip(mark.states, saved, strict=True)]
        if loops["epoch_loop.batch_progress"]["total"]["ready"] != mark.progress["total"]["ready"]:
            loops["epoch_loop.batch_progress"] = mark.progress
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] = mark.logged

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse streams that would go on from evaluation to evaluation."""
        loop: Any = trainer.validate_loop if trainer.state.fn == "validate" else trainer.fit_loop.epoch_loop.val_loop
        _check_evaluation(loop)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse streams that would go on from test to test."""
        _check_evaluation(trainer.test_loop)

    def _know(self, trainer: Any) -> None:
        self._known = _stream_loaders(trainer.fit_loop)
        self._mark = _mark(trainer) if self._known else None

    def _has_others(self, trainer: Any) -> bool:
        loaders = _stream_loaders(trainer.fit_loop)
        return any(now is not then for now, then in zip_longest(loaders, self._known))

    def _carry_over(self, trainer: Any) -> None:
        """Let loaders that `reload_dataloaders_every_n_epochs` brought go on where those before them stopped."""
        if self._mark is not None and self._has_others(trainer):
            with contextlib.suppress(StateError):  # another stream than before: it begins at its beginning
                _load(_stream_loaders(trainer.fit_loop), self._mark)
            self._begin(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _begin(self, trainer: Any, begun: int) -> None:
        """Let Lightning take batches from where its loaders stand now."""
        _fetched_ahead(trainer).clear()
        self._know(trainer)
        _load(self._known, self._mark)
        _count(trainer, begun)
        iter(trainer.fit_loop._data_fetcher)


def _leader(trainer: Any) -> StreamCallback | None:
    """Return the one that acts: there may be another, from the entry point."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, StreamCallback)), None)


def _stream_loaders(loop: Any) -> list[StreamLoader]:
    combined = loop._combined_loader
    return [] if combined is None else [loader for loader in combined.flattened if _is_ours(loader)]


def _is_ours(loader: Any) -> bool:
    ours: Any = sys.modules.get("vlm_stream.loader")  # not imported: nobody has one
    return ours is not None and isinstance(loader, ours.StreamLoader)


def _fetched_ahead(trainer: Any) -> list[Any]:
    """Return the batches that Lightning holds and has not begun to train on."""
    batches: list[Any] = getattr(trainer.fit_loop._data_fetcher, "batches", [])
    return batches


def _mark(trainer: Any) -> _Mark:
    """Return where the fit stands, if the batch in work is done with."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    combined: Any = trainer.fit_loop._combined_loader
    ahead = len(_fetched_ahead(trainer))
    states = [
        _settled(loader.state_dict(ago=ahead)) if _is_ours(loader) else None
        for loader in combined.flattened
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    ]
    return _Mark(trainer.global_step, states, _progress(trainer), epoch_loop._batches_that_stepped)


def _progress(trainer: Any, *, of_new_epoch: bool = False) -> dict[str, Any]:
    """Return Lightning's count of batches as it saves it at the end of a batch, or before the first of an epoch."""
    progress: dict[str, Any] = trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    if of_new_epoch:
        progress |= {"current": dict.fromkeys(progress["current"], 0), "is_last_batch": False}
    for count in (progress["total"], progress["current"]):
        done = count["ready"]
        count.update(started=done, processed=done, completed=done if of_new_epoch else max(done - 1, 0))
    return progress


def _settled(state: dict[str, str]) -> dict[str, str]:
    """Return the start of the next round for the end of one: Lightning stops without asking for the batch after it."""
    from vlm_stream.state import RunState

    found = RunState.from_dict(state)
    if found.length is None or found.batches < found.length[1]:
        return state
    return replace(found, rounds=found.rounds + 1, batches=0, length=None).to_dict()


def _load(loaders: list[StreamLoader], mark: _Mark | None) -> None:
    states = [state for state in mark.states if state is not None] if mark is not None else []
    for loader, state in zip(loaders, states, strict=False):
        loader.load_state_dict(state)


def _count(trainer: Any, begun: int) -> None:
    """Count the batches of the epoch of which so many are done, as Lightning does where it sets up its loaders."""
    fit_loop: Any = trainer.fit_loop
    combined, limit = fit_loop._combined_loader, trainer.limit_train_batches
    limits = []
    for loader in combined.flattened:
        length = _length(loader)
        if _is_ours(loader) and math.isfinite(length):
            length = begun + loader.batches_left
        limits.append(min(length, limit) if isinstance(limit, int) else _share(length, limit))
    combined.limits = limits
    if combined._iterator is not None:
        combined._iterator.limits = limits
        fit_loop.max_batches = _length(combined)
    if fit_loop._data_fetcher.length is not None:
        fit_loop._data_fetcher.length = fit_loop.max_batches
    interval = trainer.val_check_interval
    if isinstance(interval, float) and math.isfinite(fit_loop.max_batches) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(fit_loop.max_batches * interval))


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf


def _share(length: float, limit: float) -> float:
    return int(length * limit) if math.isfinite(length) else length


def _averages(trainer: Any) -> int:
    """Return by what Lightning divides in all: batches of an optimizer step times ranks."""
    ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
    return int(trainer.accumulate_grad_batches * ranks)


def _check_training(trainer: Any, loader: StreamLoader) -> None:
    if not loader.options.train:
        raise ConfigError(
            "the train dataloader was built with train=False: it begins at the beginning whenever it is iterated, so a "
            "resumed run would repeat what it has seen; build it with train=True"
        )
    if trainer.overfit_batches:
        raise ConfigError(
            f"overfit_batches={trainer.overfit_batches} wants the same batches in every epoch, and a StreamLoader goes "
            f"on to the next; train on DataLoader(list(islice(loader, n)), batch_size=None) instead"
        )
    world, wanted = loader.world, trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    if world.told_by not in ("arguments", "device mesh") and world.size != wanted["num_replicas"]:
        raise ConfigError(
            f"the loader found {world.size} ranks ({world.told_by}), and Lightning's strategy has "
            f"{wanted['num_replicas']} data-parallel ones, so ranks that share a model would get different data; build "
            f"the loader in train_dataloader() with device_mesh=self.device_mesh, or pass rank and world_size"
        )
    _check_accumulation(trainer, loader)
    micro_batches, batches = loader.options.micro_batches, trainer.num_training_batches
    if math.isfinite(batches) and batches % micro_batches and not trainer.fast_dev_run:
        raise ConfigError(
            f"an epoch of {batches:g} batches (limit_train_batches={trainer.limit_train_batches}) ends within an "
            f"optimizer step of micro_batches={micro_batches}, so its labels would be counted wrongly; give a limit "
            f"that is a multiple of {micro_batches}"
        )


def _check_accumulation(trainer: Any, loader: StreamLoader) -> None:
    planned, made = loader.options.micro_batches, trainer.accumulate_grad_batches
    if planned != made and trainer.lightning_module.automatic_optimization:
        raise ConfigError(
            f"Trainer(accumulate_grad_batches={made}) and StreamLoader(micro_batches={planned}) differ, so the labels "
            f"of an optimizer step would be counted wrongly and a resumed run could begin within a step; give both the "
            f"same number"
        )


def _check_evaluation(loop: Any) -> None:
    if any(loader.options.train for loader in _stream_loaders(loop)):
        raise ConfigError(
            "an evaluation dataloader was built with train=True: each evaluation would go on where the last one "
            "stopped, and see other samples; build it with train=False"
        )
