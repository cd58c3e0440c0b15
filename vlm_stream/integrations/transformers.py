"""transformers' `Trainer` on a `StreamLoader`.

    from vlm_stream.integrations.transformers import StreamTrainer

    trainer = StreamTrainer(model=model, args=arguments, train_dataset=loader, eval_dataset=eval_loader)
    trainer.train(resume_from_checkpoint=resume)

`StreamMixin` does the same for a subclass of Trainer: `class Mine(StreamMixin, TheirTrainer)`. For TRL's `SFTTrainer`
see `vlm_stream.integrations.trl`.

The loader's batches go to the model as they are, and the loop is Trainer's own. It is told what it cannot know: how
many batches a round has and how many of them are done, how many labels a step has, and where the data stands in a
checkpoint (`vlm_stream.json`). Other datasets are left to Trainer.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from vlm_stream.build import ITEM_COUNT
from vlm_stream.encode import IGNORE
from vlm_stream.errors import MissingExtraError
from vlm_stream.integrations import trainer_checks as checks
from vlm_stream.loader import StreamLoader

try:
    import accelerate  # type: ignore[import-untyped]  # noqa: F401  # without it transformers has no Trainer
    from transformers import PreTrainedModel, Trainer, TrainerState
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise MissingExtraError((error.name or "accelerate").partition(".")[0], "trainers", "StreamTrainer") from error


__all__ = ["StreamMixin", "StreamTrainer"]

_NOT_FOR_MODELS: Final = (ITEM_COUNT, "refs")

_Base: Any = object
"""The trainer comes after the mixin: what is called on `super()` is its own."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """Where a call of `train` begins."""

    global_step: int = 0
    epochs: int = 0
    """Rounds that were done before."""


class StreamMixin(_Base):  # type: ignore[misc]
    """Makes a `Trainer` take `StreamLoader`s as `train_dataset` and `eval_dataset`; it goes first among the bases."""

    model_accepts_loss_kwargs: bool

    def __init__(self, *args: Any, train_dataset: Any = None, eval_dataset: Any = None, **kwargs: Any) -> None:
        """Take what the trainer takes, loaders by keyword; refuse what would be ignored or would cut batches."""
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        checks.check_datasets(datasets)
        self._begin = _Begin()
        self._shown_epochs = 0
        self._weights: str | None = None
        self._batches: Iterator[Any] = iter(())
        self._fetched = (-1, 0)
        """For which step batches were taken last, and how many."""
        self._eval_losses: list[tuple[torch.Tensor, float, int]] | None = None
        """Of the evaluation that runs: of each batch its loss, what it was divided by, and its labels."""
        self._eval_divisor: float | None = None
        shown = self._shown_datasets(datasets, args, kwargs) if checks.find_loaders(datasets) else datasets
        super().__init__(*args, **{name: value for name, value in shown.items() if value is not None}, **kwargs)
        for name, dataset in datasets.items():
            if dataset is not None:
                setattr(self, name, dataset)
        self._model_divides = self.model_accepts_loss_kwargs
        """Whether the model divides its loss by a count that it is given. Most vision-language models do not."""
        if self._stream is not None:
            self.model_accepts_loss_kwargs = True  # they are given one here, see `compute_loss`
        checks.check_arguments(self, kwargs.get("data_collator"))

    def _shown_datasets(self, datasets: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the datasets that the trainer's constructor is shown, which gets these arguments too."""
        checks.check_release(type(self))
        checks.check_no_trl(type(self))
        return datasets

    @property
    def _stream(self) -> StreamLoader | None:
        return self.train_dataset if isinstance(self.train_dataset, StreamLoader) else None

    # What it iterates over

    def get_train_dataloader(self) -> Any:
        """Return the loader itself: nothing wraps it, so nothing takes its batches ahead or cuts them."""
        return super().get_train_dataloader() if self._stream is None else self._stream

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation loader itself."""
        loader = checks.find_eval_loader(self, eval_dataset)
        return super().get_eval_dataloader(eval_dataset) if loader is None else loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader itself."""
        loader = checks.find_eval_loader(self, test_dataset)
        return super().get_test_dataloader(test_dataset) if loader is None else loader

    def num_examples(self, dataloader: Any) -> int:
        """Return the batches of all ranks: for Trainer's figures a batch of a loader is one example."""
        if isinstance(dataloader, StreamLoader):
            return len(dataloader) * dataloader.world.size
        return int(super().num_examples(dataloader))

    # How long it trains

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        loader = self._stream
        if loader is not None:
            checks.check_world(self, loader)
            self._begin = self._resume(loader, kwargs.get("resume_from_checkpoint"))
            self._fetched = (-1, 0)
        return super()._inner_training_loop(*args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        """Count the steps of each round: they may differ, and some of them may be done."""
        values = super().set_initial_training_values(args, dataloader, *more)
        if not isinstance(dataloader, StreamLoader):
            return values
        num_epochs, steps_per_epoch, _, _, _, batches_per_epoch, max_steps = values
        self._shown_epochs = num_epochs
        if _length(dataloader) is not None and args.max_steps > 0:
            num_epochs = sys.maxsize  # the steps end the run; rounds to come may be shorter than this one
        elif _length(dataloader) is not None:
            max_steps = self._begin.global_step + self._count_steps_left(dataloader, args.num_train_epochs)
        per_step = args.gradient_accumulation_steps * dataloader.world.size
        counts = steps_per_epoch * per_step, max_steps * per_step, per_step
        return num_epochs, steps_per_epoch, *counts, batches_per_epoch, max_steps

    def _count_steps_left(self, loader: StreamLoader, num_epochs: float) -> int:
        """Return the steps from here to the end of so many epochs, of the last of which it may be a part."""
        micro_batches, last = self.args.gradient_accumulation_steps, math.ceil(num_epochs) - 1
        epochs = range(self._begin.epochs, last + 1)
        done = (len(loader) - loader.batches_left) // micro_batches
        steps = 0
        for epoch, batches in zip(epochs, loader.count_batches(len(epochs)), strict=True):
            whole = done + math.ceil(batches / micro_batches)
            wanted = math.ceil((num_epochs - last) * whole) if epoch == last else whole
            steps += max(wanted - done, 0)
            done = 0
        return steps

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        found = super()._init_training_state(max_steps, *args, **kwargs)
        if self._stream is None:
            return found
        num_epochs, self.state.num_train_epochs = self.state.num_train_epochs, self._shown_epochs
        return (num_epochs if self.state.global_step >= max_steps else self._begin.epochs), 0

    def _run_epoch(self, **kwargs: Any) -> Any:
        """Tell Trainer how long this round is. The loader begins after what is done: nothing is to be skipped."""
        loader, micro_batches = self._stream, self.args.gradient_accumulation_steps
        if loader is None:
            return super()._run_epoch(**kwargs)
        length = _begin_round(loader)
        if length is None:
            length, done = kwargs["steps_in_epoch"], self.state.global_step * micro_batches
        else:
            done = length - loader.batches_left
        epoch = kwargs["epoch"] + done / length
        if kwargs["epoch"] == kwargs["epochs_trained"]:
            kwargs["epochs_trained"] = epoch  # it is the resumed one, which restores the random numbers
        kwargs |= {
            "epoch": epoch,
            "steps_in_epoch": length,
            "num_update_steps_per_epoch": math.ceil((length - done) / micro_batches),
            "steps_trained_in_current_epoch": 0,
        }
        found = super()._run_epoch(**kwargs)
        batches, self._batches = self._batches, iter(())
        if _length(loader) is not None and not loader.batches_left:
            next(batches, None)  # Trainer took all of them, and so never heard that the round has ended
        return found

    # What a step is

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Remember for which step batches are taken: until it is done, a checkpoint stands before them."""
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._batches = epoch_iterator
        self._fetched = (self.state.global_step, len(samples))
        return samples, count

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Take the labels of a step, over all ranks and micro-batches, from its batches where the plan knows them.

        Where it does not, batches without labels say 1 and the others nothing. So 1 is taken for not known: all ranks
        must come to the same answer, because Trainer then adds up their labels.
        """
        if self._eval_losses is not None:
            return self._divide_eval_loss_by(batch_samples[0], device)
        counts = [int(batch.get(ITEM_COUNT, 1)) for batch in batch_samples]
        if min(counts, default=1) == 1 or not self.args.average_tokens_across_devices:
            count = super()._get_num_items_in_batch(batch_samples, device)
            return None if count is None else count.clamp(min=1)
        return torch.tensor(counts[0], device=device)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Divide the loss by the labels of the whole step, also if the model only knows the mean of its own labels."""
        if self._stream is None and self._eval_losses is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = {name: value for name, value in inputs.items() if name not in _NOT_FOR_MODELS}
        if "position_ids" in inputs and "attention_mask" not in inputs:
            inputs["use_cache"] = False  # with a cache, models do not look for the documents of a pack
        if num_items_in_batch is None or self._model_divides or self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        count = self._count_labels(inputs)
        mean, outputs = super().compute_loss(model, inputs, return_outputs=True)
        mean = torch.where(count > 0, mean, torch.zeros_like(mean))  # the mean of no labels is no number
        loss = mean * (count / num_items_in_batch * self._ranks)
        return (loss, outputs) if return_outputs else loss

    @property
    def _ranks(self) -> int:
        """Return by what Trainer multiplies a loss that was divided by the labels of all ranks."""
        whole = self.args.average_tokens_across_devices
        return int(self.accelerator.num_processes // self.get_tp_size()) if whole else 1

    def _count_labels(self, batch: dict[str, Any]) -> torch.Tensor:
        labels: torch.Tensor | None = batch.get("labels")
        if labels is None:
            return torch.tensor(0)
        return labels[..., 1:].ne(IGNORE).sum()  # the loss shifts them

    # Evaluation

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. For the figures of speed, a batch of a loader is one example."""
        loader = checks.find_eval_loader(self, eval_dataset)
        if loader is None:
            return super().evaluate(eval_dataset, *args, **kwargs)
        checks.check_eval_loader(loader)
        rows, self.args.per_device_eval_batch_size = self.args.per_device_eval_batch_size, 1
        try:
            return super().evaluate(eval_dataset, *args, **kwargs)
        finally:
            self.args.per_device_eval_batch_size = rows

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the loss of a loader the mean over all its labels, whatever its packs and the number of ranks."""
        if not isinstance(dataloader, StreamLoader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        losses: list[tuple[torch.Tensor, float, int]] = []
        self._eval_losses = losses
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._eval_losses = None
        sums = sum(loss.item() * divisor for loss, divisor, _ in losses), sum(count for *_, count in losses)
        loss, count = self._sum_over_ranks(*sums)
        name = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        if name in output.metrics and count:
            output.metrics[name] = loss / count
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Keep the loss of each batch; one that has no labels has none."""
        if self._eval_losses is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        self._eval_divisor = None
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        count = int(self._count_labels(inputs))
        if loss is not None:
            loss = loss if count else torch.zeros_like(loss)
            divisor = count if self._eval_divisor is None else self._eval_divisor
            self._eval_losses.append((loss.detach(), divisor, count))
        return loss, *others

    def _divide_eval_loss_by(self, batch: dict[str, Any], device: Any) -> Any:
        """Return by what the loss of one batch is divided: a number that ranks need not agree on."""
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            return None
        divisor = int(batch[ITEM_COUNT]) if ITEM_COUNT in batch else int(self._count_labels(batch)) * self._ranks
        self._eval_divisor = max(divisor, 1) / self._ranks
        return torch.tensor(max(divisor, 1), device=device)

    def _sum_over_ranks(self, *values: float) -> list[float]:
        if self.args.world_size == 1:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64, device=self.args.device)
        return list(self.accelerator.reduce(own, "sum").tolist())

    # Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save where the data stands, first: a checkpoint that has the trainer's state has that of the data too."""
        if self._stream is not None and self.args.should_save:
            step, num_fetched = self._fetched
            ago = num_fetched if step == self.state.global_step else 0  # taken for a step that is not done
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            checks.write_state(folder, self._stream.state_dict(ago=ago))
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._weights = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._weights = self.state.best_model_checkpoint
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load weights that Trainer did not find.

        Models are saved under the names of their published checkpoints, which are not always those of their own
        parameters. `from_pretrained` knows both; Trainer only warns, and trains on from the weights that it began with.
        """
        if self._stream is None or not load_result.missing_keys or not isinstance(self.model, PreTrainedModel):
            super()._issue_warnings_after_load(load_result)
        else:
            saved = type(self.model).from_pretrained(self._weights, config=self.model.config)
            self.model.load_state_dict(saved.state_dict())

    def _resume(self, loader: StreamLoader, checkpoint: str | None) -> _Begin:
        """Put the loader where the checkpoint was saved; return how much was trained until then."""
        if checkpoint is None:
            _begin_round(loader)
            return _Begin()
        state = checks.read_state(Path(checkpoint), may_be_missing=self.args.ignore_data_skip)
        if state is not None:
            loader.load_state_dict(state)
        length = _begin_round(loader)
        saved = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        epochs = 0 if length is None else math.floor((saved.epoch or 0) + 0.5 / length)
        return _Begin(saved.global_step, epochs)


class StreamTrainer(StreamMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that takes `StreamLoader`s as `train_dataset` and `eval_dataset`.

    >>> trainer = StreamTrainer(model=model, args=arguments, train_dataset=loader)  # doctest: +SKIP
    >>> trainer.train()                                                             # doctest: +SKIP
    """


def _length(loader: StreamLoader) -> int | None:
    """Return the batches of the present round; None: it has no end."""
    try:
        return len(loader)
    except TypeError:
        return None


def _begin_round(loader: StreamLoader) -> int | None:
    """Go to the next round if this one is at its end; return the batches of the round, None if it has no end."""
    length = _length(loader)
    if length is not None and not loader.batches_left:
        loader.end_round()
        length = len(loader)
    return length
