"""Rows and padding: what every collate function does to tensors with one entry per token.

Enters: padded batches or lists of rows. Leaves: the other of the two; the shift by one token; a cut that takes no media
away. Knows keys, not families.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.encode import media_token_ids
from vlm_stream.errors import BadSampleError
from vlm_stream.keys import IGNORE
from vlm_stream.keys import TOKEN_KEYS as SEQUENCE_KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["cut_rows", "pad_id_of", "pad_rows", "pad_to", "shift", "split_rows"]

_FILL: Final = {"labels": IGNORE}
_MEDIA_WORDS: Final = ("pixel", "grid", "image", "video", "audio", "feature", "size", "patches", "sound", "n_")


def pad_id_of(processor: Any) -> int:
    """Return the padding token of a processor, 0 when it has none."""
    return int(getattr(getattr(processor, "tokenizer", processor), "pad_token_id", None) or 0)


def split_rows(batch: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return the per-token tensors of each row without padding."""
    mask = batch["attention_mask"].bool()
    keys = [key for key in SEQUENCE_KEYS if key in batch]
    return [{key: batch[key][row][mask[row]] for key in keys} for row in range(len(mask))]


def pad_rows(
    rows: Sequence[Mapping[str, torch.Tensor]], *, pad_id: int, length: int | None = None, side: str = "right"
) -> dict[str, torch.Tensor]:
    """Return the rows' per-token tensors as [B, S]; a key that only some rows have is 0 in the others."""
    longest = length or max(len(row["input_ids"]) for row in rows)
    padded = {}
    for key in (key for key in SEQUENCE_KEYS if any(key in row for row in rows)):
        value = pad_id if key == "input_ids" else _FILL.get(key, 0)
        out = torch.full((len(rows), longest), value, dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens = row.get(key)
            if tokens is None:
                continue
            tokens = tokens[0] if tokens.ndim == 2 else tokens
            place = slice(0, len(tokens)) if side == "right" else slice(longest - len(tokens), longest)
            out[index, place] = tokens
        padded[key] = out
    return padded


def pad_to(batch: dict[str, Any], length: int, pad_id: int) -> dict[str, Any]:
    """Return the batch with its per-token tensors padded on the right to `length` columns."""
    missing = length - batch["input_ids"].shape[1]
    if missing <= 0:
        return batch
    fill = {"input_ids": pad_id, **_FILL}
    return {
        key: torch.nn.functional.pad(value, (0, missing), value=fill.get(key, 0)) if key in SEQUENCE_KEYS else value
        for key, value in batch.items()
    }


def cut_rows(batch: dict[str, Any], max_length: int, processor: Any) -> dict[str, Any]:
    """Return the batch cut to `max_length` columns.

    Raises:
        BadSampleError: When the cut would take media tokens away: their pixels would match nothing.
    """
    ids = batch["input_ids"]
    if ids.shape[1] <= max_length:
        return batch
    media = torch.tensor(sorted(media_token_ids(processor)), dtype=ids.dtype)
    lost = torch.isin(ids[:, max_length:], media) & batch["attention_mask"][:, max_length:].bool()
    if bool(lost.any()):
        row = int(torch.nonzero(lost.any(dim=1))[0])
        raise BadSampleError(
            "fit",
            "truncated_media",
            f"Cutting row {row} at {max_length} tokens cuts into multimodal tokens. Raise max_length, make images "
            "smaller, or drop overlong samples.",
        )
    return {key: value[:, :max_length] if key in SEQUENCE_KEYS else value for key, value in batch.items()}


def shift(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with labels moved one token to the left: column t is to predict label t.

    Labels lose their first column, every other per-token tensor its last. Media keep theirs, also when their shape
    happens to be that of the ids.
    """
    shape = batch["input_ids"].shape
    out: dict[str, Any] = {}
    for key, value in batch.items():
        if key == "labels":
            out[key] = value[:, 1:].contiguous()  # losses take views of it
        elif isinstance(value, torch.Tensor) and value.shape == shape and not _is_media(key):
            out[key] = value[:, :-1].contiguous()
        else:
            out[key] = value
    return out


def _is_media(key: str) -> bool:
    return key not in SEQUENCE_KEYS and any(word in key for word in _MEDIA_WORDS)
