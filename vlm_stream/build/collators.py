"""How rows of encoded samples become a batch: packed, padded, or by a function of the user's.

The first two give what `model(**batch, use_cache=False)` of a transformers model takes: labels that are not shifted
(the model's loss does that, once), positions that restart with each packed document, media joined in row order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.functional import pad

from vlm_stream.collate import (
    PositionRule,
    build_hf_pack,
    count_media,
    join_hf_packs,
    merge_media,
    pad_collate_fn,
)
from vlm_stream.errors import ConfigError
from vlm_stream.keys import IGNORE, PIXEL_KEYS
from vlm_stream.pixels import carry_spec
from vlm_stream.pp_media import prepare_vlm_media_for_pp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.collate import Positions
    from vlm_stream.options import CollateFn, StreamOptions

__all__ = ["Collator", "CustomCollator", "PackedCollator", "PaddedCollator", "make_collator"]

_TOKEN_FILLS = {"input_ids": None, "attention_mask": 0, "labels": IGNORE, "mm_token_type_ids": 0, "token_type_ids": 0}


class Collator(Protocol):
    """Joins rows of encoded samples."""

    capacity: int | None
    """Tokens that one row may hold; None: any number."""
    is_ours: bool
    """What it raises can be the fault of a sample; not so for a function of the user's."""

    def __call__(self, rows: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """Return the batch; every row has at least one sample."""
        ...


class PackedCollator:
    """Several samples a row, as documents that do not see each other."""

    is_ours = True

    def __init__(self, processor: Any, options: StreamOptions) -> None:
        """Read the padding token and the family's position rule from the processor."""
        self.capacity: int | None = options.pack_size
        self._padding_idx = _padding_idx(processor)
        self._positions = _position_rule(processor, options)
        self._options = options

    def __call__(self, rows: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """Pack each row, then pad the rows to the longest."""
        options = self._options
        packs = [
            build_hf_pack(
                row,
                padding_idx=self._padding_idx,
                positions=self._positions,
                hf_labels=options.hf_labels,
                attention=options.attention,
            )
            for row in rows
        ]
        return join_hf_packs(
            packs,
            padding_idx=self._padding_idx,
            pad_to=options.pack_size if options.pad_rows else None,
            media_counts=options.pp_microbatches is not None,
        )


class PaddedCollator:
    """One sample a row, padded on the right to the longest."""

    capacity: int | None = None
    is_ours = True

    def __init__(self, processor: Any, options: StreamOptions) -> None:
        """Read the padding token from the processor; and the position rule, where the model cannot follow its own.

        Stages behind the first have no grids; and of a hidden fake image models skip the tokens but not the grid, and
        so give it to the next row.
        """
        self._padding_idx = _padding_idx(processor)
        self._for_pipeline = options.pp_microbatches is not None
        needs_positions = self._for_pipeline or options.fake_image
        self._positions = _position_rule(processor, options) if needs_positions else None

    def __call__(self, rows: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """Pad and stack."""
        samples = [sample for row in rows for sample in row]
        length = max(len(sample["input_ids"]) for sample in samples)
        batch = {}
        for key, fill in _TOKEN_FILLS.items():
            if any(key in sample for sample in samples):
                value = self._padding_idx if fill is None else fill
                batch[key] = torch.stack([_padded(sample, key, length, value) for sample in samples])
        if "labels" in batch:
            batch["labels"][:, 0] = IGNORE  # no token comes before it: losses do not learn it, and must not count it
        axes = [None if self._positions is None else self._positions(sample) for sample in samples]
        known = [pad(row, (0, length - row.shape[1])) for row in axes if row is not None]  # each [3, length]
        if known:
            batch["position_ids"] = torch.stack(known, dim=1)
        counts = count_media(samples) if self._for_pipeline else {}
        return batch | counts | merge_media(samples)


class CustomCollator:
    """A function of the user's (or one of `vlm_stream.collate`), called with the rows and the processor."""

    def __init__(self, function: CollateFn, processor: Any, capacity: int | None) -> None:
        """Keep the function; a capacity means that rows are packs."""
        self.capacity = capacity
        self.is_ours = function is pad_collate_fn
        self._function = function
        self._processor = processor

    def __call__(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Call it: a packed row is a list of samples, any other row a sample."""
        given = rows if self.capacity is not None else [sample for row in rows for sample in row]
        batch = self._function(given, self._processor)
        if not isinstance(batch, dict):
            raise ConfigError(
                f"collate_fn returned {type(batch).__name__}, but a batch is a dict, to which names of samples may be "
                f"added; return one, for instance {{'samples': ...}}"
            )
        return batch


def make_collator(processor: Any, options: StreamOptions) -> Collator:
    """Return the collator that the options ask for, with media cut for a pipeline if they do."""
    collator: Collator
    if options.collate_fn is not None:
        collator = CustomCollator(options.collate_fn, processor, options.pack_size if _packs(options) else None)
    elif _packs(options):
        collator = PackedCollator(processor, options)
    elif options.hf_labels:
        collator = PaddedCollator(processor, options)
    else:
        collator = CustomCollator(pad_collate_fn, processor, None)
    return _Finished(collator, options)


class _Finished:
    """What every batch gets at last, however it was joined."""

    def __init__(self, collator: Collator, options: StreamOptions) -> None:
        self.capacity = collator.capacity
        self.is_ours = collator.is_ours
        self._collator = collator
        self._options = options

    def __call__(self, rows: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        batch = self._collator(rows)
        if self._options.pixels == "compact" and any(name in batch for name in PIXEL_KEYS):
            # A collation of the user's need not know that its pixels are compact.
            batch |= carry_spec(sample for row in rows for sample in row)
        if self._options.hf_labels and self._options.collate_fn is None:
            batch = _with_safe_loss(batch)
        if self._options.pp_microbatches is not None:
            prepare_vlm_media_for_pp(batch, len(batch["input_ids"]), self._options.pp_microbatches)
        return batch


def _packs(options: StreamOptions) -> bool:
    return options.mode == "packed"


def _position_rule(processor: Any, options: StreamOptions) -> Positions | None:
    if options.model_config is not None:
        return PositionRule.from_config(options.model_config)
    try:
        return PositionRule.from_processor(processor)
    except ConfigError as error:
        raise ConfigError(f"{error} A stream takes the config as model_config=model.config.") from error


def _padding_idx(processor: Any) -> int:
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


def _padded(sample: dict[str, Any], key: str, length: int, fill: int) -> torch.Tensor:
    num_tokens = len(sample["input_ids"])
    row = torch.full((length,), fill, dtype=torch.long)
    if key in sample:
        row[:num_tokens] = sample[key].reshape(-1)
    elif key == "attention_mask":
        row[:num_tokens] = 1
    return row


def _with_safe_loss(batch: dict[str, Any]) -> dict[str, Any]:
    """Keep the loss of a batch without any label at zero: transformers would divide by no labels and return NaN.

    Where the labels of the whole step are known, these take the place of the 1 (see `delivery.py`).
    """
    if not (batch["labels"] != IGNORE).any():
        batch["num_items_in_batch"] = torch.ones((), dtype=torch.long)
    return batch
