"""Packed rows become a batch: padded to one length, with the mask form that the attention backend wants.

Enters: packed samples, whose labels are shifted already and whose `attention_mask` numbers the documents 1, 2, ... (0:
padding, or a token that attention must not see). Leaves: the batch. How packs are built is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.collate.join_media import join_media
from vlm_stream.encode import IGNORE
from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["block_causal_mask", "neat_packed_vlm_collater", "pad_column", "pad_positions"]

_FLASH: Final = "flash_attention_"


def neat_packed_vlm_collater(
    batch: list[dict[str, Any]],
    padding_idx: int = 0,
    max_length: int | None = None,
    attn_implementation: str = "sdpa",
    materialize_4d_mask: bool = True,
) -> dict[str, Any]:
    """Collate packed samples; nothing is shifted here.

    Args:
        batch: Packed samples of any lengths.
        padding_idx: Token id of padding.
        max_length: Length of every batch; None: that of the longest pack.
        attn_implementation: The flash_attention family keeps the mask [B, S] of document numbers; anything else gets a
            boolean mask [B, 1, S, S].
        materialize_4d_mask: False keeps the mask of document numbers for every backend.

    Returns:
        `input_ids`, `labels`, `mm_token_type_ids` [B, S], `position_ids` [B, S] or [3, B, S], `attention_mask`, the
        joined media, and `_packed_seq_ids` [B, S] (document numbers) where more than one document shares a row.

    Raises:
        ConfigError: When a pack is longer than `max_length`.
    """
    if not batch:
        return {}
    length = padded_length(batch, max_length)
    documents = pad_column(batch, "attention_mask", length, 0)
    out: dict[str, Any] = {
        "input_ids": pad_column(batch, "input_ids", length, padding_idx),
        "labels": pad_column(batch, "labels", length, IGNORE),
        "mm_token_type_ids": pad_column(batch, "mm_token_type_ids", length, 0),
        "position_ids": pad_positions(batch, length),
    }
    is_compact = attn_implementation.startswith(_FLASH) or not materialize_4d_mask
    out["attention_mask"] = documents if is_compact else block_causal_mask(documents)
    if not materialize_4d_mask or bool((documents > 1).any()):
        out["_packed_seq_ids"] = documents
    return out | join_media(batch) | _counts(batch)


def padded_length(batch: Sequence[dict[str, Any]], max_length: int | None) -> int:
    """Return the length to pad to; refuse packs that are longer than it."""
    longest = max(len(pack["input_ids"]) for pack in batch)
    if max_length is not None and longest > max_length:
        raise ConfigError(
            f"A pack has {longest} tokens but batches are padded to {max_length}; cutting it would lose labels and "
            "media. Pack with a capacity of at most max_length, or raise max_length."
        )
    return max_length or longest


def pad_column(batch: Sequence[dict[str, Any]], key: str, length: int, value: int) -> torch.Tensor:
    """Return [B, length]; a row without the key is all `value`."""
    out = torch.full((len(batch), length), value, dtype=torch.int64)
    for row, pack in enumerate(batch):
        tokens = pack.get(key)
        if tokens is not None:
            out[row, : len(tokens)] = tokens
    return out


def pad_positions(batch: Sequence[dict[str, Any]], length: int) -> torch.Tensor:
    """Return [B, length], or [axes, B, length] when the packs carry several position axes (mRoPE)."""
    axes = max((pack["position_ids"].shape[0] for pack in batch if pack["position_ids"].ndim == 2), default=0)
    if not axes:
        return pad_column(batch, "position_ids", length, 0)
    out = torch.zeros((axes, len(batch), length), dtype=torch.int64)
    for row, pack in enumerate(batch):
        positions = pack["position_ids"]  # [axes, L], or [L] for a pack without media: the same on every axis
        out[:, row, : positions.shape[-1]] = positions
    return out


def block_causal_mask(documents: torch.Tensor) -> torch.Tensor:
    """Return [B, 1, S, S]: true where query and key share a document and the key is not later.

    A query that attends to nothing (padding, hidden tokens) would make a softmax over nothing and NaN with it, so each
    of those sees itself; nobody else sees it, and it carries no label.
    """
    length = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)  # [B, query, key]
    visible = (documents > 0).unsqueeze(1)  # [B, 1, key]
    causal = torch.ones((length, length), dtype=torch.bool, device=documents.device).tril_()
    itself = torch.eye(length, dtype=torch.bool, device=documents.device)
    return ((same & visible & causal) | itself).unsqueeze(1)


def _counts(batch: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    counts = {
        f"n_{medium}_per_sample": torch.tensor([int(pack.get(f"n_{medium}") or 0) for pack in batch])
        for medium in ("images", "videos")
    }
    return {key: value for key, value in counts.items() if bool(value.any())}
