"""Packed rows in THD layout: no mask, but the lengths of the documents, for kernels that take cumulative lengths.

Enters: packed samples. Leaves: padded ids, labels, positions, and `seq_lens` / `seq_lens_padded` [B, most documents],
filled with a value that no length has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.collate.join_media import join_media
from vlm_stream.collate.packed import pad_column, pad_positions
from vlm_stream.encode import IGNORE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["packed_sequence_thd_vlm_collater"]


def packed_sequence_thd_vlm_collater(
    batch: list[dict[str, Any]],
    padding_idx: int = 0,
    max_length: int | None = None,
    seq_lens_padding_value: int = -1000,
) -> dict[str, Any]:
    """Collate packed samples into THD layout.

    Args:
        batch: Packed samples; `seq_lens` and `seq_lens_padded` (both or neither) give the documents' lengths, otherwise
            they are counted in the mask of document numbers.
        padding_idx: Token id of padding.
        max_length: Length of every row; None: that of the longest pack.
        seq_lens_padding_value: Fills the rows of the length tables.

    Returns:
        `input_ids`, `labels`, `position_ids`, `seq_lens`, `seq_lens_padded`, `qkv_format`, and the joined media.

    Raises:
        ValueError: When a pack is too long, or its lengths contradict themselves or its tokens.
    """
    if not batch:
        return {}
    longest = max(len(pack["input_ids"]) for pack in batch)
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"A pack has {longest} tokens, more than max_length={max_length}; pack with a smaller capacity."
        )
    length = max_length or longest
    lens = [_document_lengths(pack) for pack in batch]
    padded = [
        _with_row_padding(wide, length - len(pack["input_ids"])) for (_, wide), pack in zip(lens, batch, strict=True)
    ]
    out: dict[str, Any] = {
        "input_ids": pad_column(batch, "input_ids", length, padding_idx),
        "labels": pad_column(batch, "labels", length, IGNORE),
        "position_ids": pad_positions(batch, length),
        "seq_lens": _table([real for real, _ in lens], seq_lens_padding_value),
        "seq_lens_padded": _table(padded, seq_lens_padding_value),
        "qkv_format": "thd",
    }
    return out | join_media(batch)


def _document_lengths(pack: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return real and padded lengths of a pack's documents."""
    real, wide = pack.get("seq_lens"), pack.get("seq_lens_padded")
    if (real is None) != (wide is None):
        raise ValueError("A pack has one of seq_lens and seq_lens_padded; it needs both or neither.")
    if real is None or wide is None:
        counts = torch.bincount(pack["attention_mask"])[1:].tolist()
        return counts, counts
    real, wide = [int(n) for n in real], [int(n) for n in wide]
    if len(real) != len(wide) or any(not 0 <= r <= w for r, w in zip(real, wide, strict=False)):
        raise ValueError(f"seq_lens {real} do not fit into seq_lens_padded {wide}.")
    if sum(wide) != len(pack["input_ids"]):
        raise ValueError(f"seq_lens_padded add up to {sum(wide)}, but the pack has {len(pack['input_ids'])} tokens.")
    return real, wide


def _with_row_padding(wide: Sequence[int], missing: int) -> list[int]:
    """Add the padding of the row to its last document."""
    return [*wide[:-1], wide[-1] + missing] if wide else []


def _table(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    out = torch.full((len(rows), max(len(row) for row in rows)), fill, dtype=torch.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return out
