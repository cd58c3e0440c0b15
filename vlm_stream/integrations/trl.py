"""TRL's `SFTTrainer` on a `StreamLoader`: packed images, no other dataset, no collator.

    from vlm_stream.integrations.trl import StreamSFTTrainer

    trainer = StreamSFTTrainer(model=model, args=config, train_dataset=loader, eval_dataset=eval_loader)
    trainer.train(resume_from_checkpoint=resume)

`StreamSFTMixin` does the same for a subclass of SFTTrainer. Loss, entropy and token accuracy are TRL's own; the count
of tokens is the loader's, because TRL takes the axes of packed positions for rows.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from vlm_stream.errors import ConfigError, MissingExtraError
from vlm_stream.integrations import trainer_checks as checks
from vlm_stream.integrations.transformers import StreamMixin
from vlm_stream.loader import StreamLoader
from vlm_stream.processors import open_processor

try:
    from datasets import Dataset
    from trl.trainer.sft_trainer import SFTTrainer
except ImportError as error:
    package = (error.name or "trl").partition(".")[0]
    raise MissingExtraError(package, "trainers", "StreamSFTTrainer") from error


__all__ = ["StreamSFTMixin", "StreamSFTTrainer"]

_REFUSED: Final = {
    "packing": "the loader packs already (pack_size)",
    "eval_packing": "the loader packs already (pack_size)",
    "padding_free": "the loader's packs have no padding already (pack_size)",
    "assistant_only_loss": "the loader labels what the assistant says, and nothing else",
    "completion_only_loss": "the loader labels what the assistant says, and nothing else",
    "chat_template_path": "the loader encodes with its own processor, so give that one the template",
}
"""Settings of `SFTConfig` about what the loader has done already."""


class StreamSFTMixin(StreamMixin):
    """Makes TRL's `SFTTrainer`, or a subclass, take `StreamLoader`s; it goes first among the bases."""

    _total_train_tokens: int

    def _shown_datasets(self, datasets: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return one empty row for each loader: TRL's constructor looks at columns, and nothing trains on them.

        The row says that there are images, so that TRL leaves the data alone. The processor is by default the loader's.
        """
        checks.check_release(type(self))
        loader = datasets["train_dataset"]
        if not isinstance(loader, StreamLoader):
            raise ConfigError(
                "eval_dataset is a StreamLoader and train_dataset is not, and SFTTrainer would prepare both alike; "
                "give it a StreamLoader as train_dataset too"
            )
        _check_config(kwargs.get("args") or next(iter(args[1:2]), None), kwargs)
        if kwargs.get("processing_class") is None:
            kwargs["processing_class"] = open_processor(loader.stream.processor)
        row = Dataset.from_dict({"images": [[]], "messages": [[]]})
        return {name: _show(dataset, row) for name, dataset in datasets.items()}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what the trainer takes, loaders by keyword."""
        super().__init__(*args, **kwargs)
        self._model_divides = True  # TRL does, whatever the model

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._stream is not None:
            self._counted = (self._total_train_tokens, self._stream.metrics()["tokens"])
        return super()._inner_training_loop(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Correct TRL's count of tokens: those of the samples, without padding and fillers."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if self._stream is not None and self.model.training:
            before, own_before = self._counted
            own = torch.tensor(int(self._stream.metrics()["tokens"] - own_before), device=self.accelerator.device)
            self._total_train_tokens = before + int(self.accelerator.gather(own).sum()) // self._tp_size
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return result


class StreamSFTTrainer(StreamSFTMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's `SFTTrainer` that takes `StreamLoader`s as `train_dataset` and `eval_dataset`.

    >>> trainer = StreamSFTTrainer(model=model, args=SFTConfig("runs"), train_dataset=loader)  # doctest: +SKIP
    >>> trainer.train()                                                                       # doctest: +SKIP
    """


def _check_config(config: Any, kwargs: Mapping[str, Any]) -> None:
    for name, reason in _REFUSED.items():
        if getattr(config, name, None):
            raise ConfigError(
                f"SFTConfig({name}={getattr(config, name)!r}) is about data that TRL prepares itself, but {reason}; "
                f"leave it out"
            )
    if kwargs.get("formatting_func") is not None:
        raise ConfigError(
            "formatting_func is for text that TRL prepares itself, but the batches of a StreamLoader are finished, so "
            "it would never be called; leave it out, and put its text into the shards"
        )


def _show(dataset: Any, row: Dataset) -> Any:
    if isinstance(dataset, dict):
        return {name: _show(one, row) for name, one in dataset.items()}
    return row if isinstance(dataset, StreamLoader) else dataset
