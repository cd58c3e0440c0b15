"""How rows of encoded samples become a batch: packed, or padded.

Both give what `model(**batch, use_cache=False)` of a transformers model takes: labels that are not shifted (the model's
loss does that, once), positions that restart with each packed document, and media joined in the order of the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from vlm_stream.packs import IGNORE, PositionRule, build_hf_pack, join_hf_packs, merge_media

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.stream.options import StreamOptions

__all__ = ["Collator", "PackedCollator", "PaddedCollator", "make_collator"]

_TOKEN_FILLS = {"input_ids": None, "attention_mask": 0, "labels": IGNORE, "mm_token_type_ids": 0, "token_type_ids": 0}


class Collator(Protocol):
    """Joins rows of encoded samples."""

    capacity: int | None
    """Tokens that one row may hold; None: any number."""

    def __call__(self, rows: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """Return the batch; every row has at least one sample."""
        ...


class PackedCollator:
    """Several samples a row, as documents that do not see each other."""

    def __init__(self, *, capacity: int, padding_idx: int, positions: PositionRule | None) -> None:
        """Take the size of a row and the family's position rule (None: positions count on by one)."""
        self.capacity: int | None = capacity
        self._padding_idx = padding_idx
        self._positions = positions

    def __call__(self, rows: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """Pack each row, then pad the rows to the longest."""
        packs = [build_hf_pack(row, padding_idx=self._padding_idx, positions=self._positions) for row in rows]
        return _with_safe_loss(join_hf_packs(packs, padding_idx=self._padding_idx))


class PaddedCollator:
    """One sample a row, padded on the right to the longest."""

    capacity: int | None = None

    def __init__(self, *, padding_idx: int) -> None:
        """Take the token of padding slots."""
        self._padding_idx = padding_idx

    def __call__(self, rows: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """Pad and stack."""
        samples = [sample for row in rows for sample in row]
        length = max(len(sample["input_ids"]) for sample in samples)
        batch = {}
        for key, fill in _TOKEN_FILLS.items():
            if any(key in sample for sample in samples):
                value = self._padding_idx if fill is None else fill
                batch[key] = torch.stack([_padded(sample, key, length, value) for sample in samples])
        return _with_safe_loss(batch | merge_media(samples))


def make_collator(processor: Any, options: StreamOptions) -> Collator:
    """Return the collator of the mode, with what the processor says of padding and positions."""
    tokenizer = getattr(processor, "tokenizer", processor)
    padding_idx = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    if options.mode != "packed":
        return PaddedCollator(padding_idx=padding_idx)
    assert options.pack_size is not None  # noqa: S101 - StreamOptions refuses a packed mode without it
    return PackedCollator(
        capacity=options.pack_size, padding_idx=padding_idx, positions=PositionRule.from_processor(processor)
    )


def _padded(sample: dict[str, Any], key: str, length: int, fill: int) -> torch.Tensor:
    num_tokens = len(sample["input_ids"])
    row = torch.full((length,), fill, dtype=torch.long)
    if key in sample:
        row[:num_tokens] = sample[key].reshape(-1)
    elif key == "attention_mask":
        row[:num_tokens] = 1
    return row


def _with_safe_loss(batch: dict[str, Any]) -> dict[str, Any]:
    """Keep the loss of a batch without any label at zero: transformers would divide by no labels and return NaN."""
    if not (batch["labels"] != IGNORE).any():
        batch["num_items_in_batch"] = torch.ones((), dtype=torch.long)
    return batch
