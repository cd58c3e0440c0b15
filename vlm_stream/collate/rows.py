"""Tensors along the tokens: rows, padding, cutting, and the shift by one token.

Enters: padded batches, or rows of single samples. Leaves: the other of the two. Knows keys, not families.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from vlm_stream.encode import media_token_ids, tokenizer_of
from vlm_stream.errors import BadSampleError
from vlm_stream.keys import IGNORE, POSITIONS_KEY, TOKEN_KEYS, Sample

_FILLS: Final = {"labels": IGNORE}
_MEDIA_WORDS: Final = ("pixel", "grid", "image", "video", "audio", "feature", "size", "patches", "sound", "n_")


def pad_id_of(processor: Any) -> int:
    """Return the padding token of a processor, 0 when it has none."""
    return int(getattr(getattr(processor, "tokenizer", processor), "pad_token_id", None) or 0)


def padding_side(processor: Any) -> str:
    """Return the side on which the tokenizer pads."""
    return str(getattr(tokenizer_of(processor), "padding_side", "right"))


def token_row(sample: Sample, key: str) -> torch.Tensor | None:
    """Return a value along the tokens as `[length]`, whether it came with a batch axis or not."""
    value = sample.get(key)
    if value is None:
        return None
    row = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    return row[0] if row.ndim == 2 else row


def split_rows(batch: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return the per-token tensors of each row without padding."""
    mask = batch["attention_mask"].bool()
    keys = [key for key in TOKEN_KEYS if key in batch]
    return [{key: batch[key][row][mask[row]] for key in keys} for row in range(len(mask))]


def pad_rows(
    rows: Sequence[Sample], *, pad_id: int, length: int | None = None, side: str = "right"
) -> dict[str, torch.Tensor]:
    """Return the per-token tensors of the rows as `[B, S]`; a key that only some rows have is 0 in the others."""
    longest = length or max(len(row["input_ids"]) for row in rows)
    padded = {}
    for key in (key for key in TOKEN_KEYS if any(key in row for row in rows)):
        out = torch.full((len(rows), longest), pad_id if key == "input_ids" else _FILLS.get(key, 0), dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens = token_row(row, key)
            if tokens is not None:
                num_tokens = len(row["input_ids"])  # a value of another length is no value along the tokens
                place = slice(0, num_tokens) if side == "right" else slice(longest - num_tokens, longest)
                out[index, place] = tokens
        padded[key] = out
    return padded


def fit_to(batch: dict[str, Any], length: int, processor: Any) -> dict[str, Any]:
    """Return the batch with exactly `length` columns: cut, never through media, or padded on the right."""
    batch = cut_to(batch, length, processor)
    missing = length - batch["input_ids"].shape[1]
    fills = {"input_ids": pad_id_of(processor), **_FILLS}
    return {
        key: torch.nn.functional.pad(value, (0, missing), value=fills.get(key, 0)) if key in TOKEN_KEYS else value
        for key, value in batch.items()
    }


def cut_to(batch: dict[str, Any], max_length: int, processor: Any) -> dict[str, Any]:
    """Return the batch with at most `max_length` columns; a cut that takes media tokens away is a bad sample."""
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
    return {key: value[:, :max_length] if key in TOKEN_KEYS else value for key, value in batch.items()}


def shift(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with labels moved one token to the left: column t is to predict label t.

    Labels lose their first column, every other per-token tensor its last. Media keep theirs, even if their shape
    happens to be that of the ids.
    """
    shape = batch["input_ids"].shape
    out: dict[str, Any] = {}
    for key, value in batch.items():
        if key == "labels":
            out[key] = value[:, 1:].contiguous()  # losses take views of it
        elif isinstance(value, torch.Tensor) and value.shape == shape and not _is_named_like_media(key):
            out[key] = value[:, :-1].contiguous()
        else:
            out[key] = value
    return out


def _is_named_like_media(key: str) -> bool:
    return key not in TOKEN_KEYS and any(word in key for word in _MEDIA_WORDS)


def shift_sample(sample: Sample, has_mrope: bool = False) -> dict[str, Any]:
    """Drop the last token and the first label of one sample, before samples are packed.

    Args:
        sample: `input_ids`, `labels` `[n]`, `attention_mask` `[n]` or none, and whatever else the encoder gave.
        has_mrope: Whether `position_ids` `[3, n]` are kept.

    Returns:
        A new sample of n - 1 tokens; its media stay as they are.
    """
    rows = {key: row for key in TOKEN_KEYS if (row := token_row(sample, key)) is not None}
    rows.setdefault("attention_mask", torch.ones_like(rows["input_ids"]))
    shifted: dict[str, Any] = {key: row[1:] if key == "labels" else row[:-1] for key, row in rows.items()}
    if has_mrope and sample.get(POSITIONS_KEY) is not None:
        shifted[POSITIONS_KEY] = sample[POSITIONS_KEY][:, :-1]
    others = {k: v for k, v in sample.items() if k not in (*TOKEN_KEYS, POSITIONS_KEY) and v is not None}
    return shifted | others
