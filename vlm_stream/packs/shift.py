"""`shift_sample`: token i answers for token i + 1, within one sample.

Enters: an encoded sample of n tokens. Leaves: n - 1 tokens with the label of the next one, and the media as they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.packs.keys import TOKEN_KEYS, token_row

if TYPE_CHECKING:
    from vlm_stream.packs.keys import Sample

__all__ = ["shift_sample"]


def shift_sample(sample: Sample, has_mrope: bool = False) -> dict[str, Any]:
    """Drop the last token and the first label, before samples are joined.

    Args:
        sample: `input_ids`, `labels` `[n]`, `attention_mask` `[n]` or none, and whatever else the encoder gave.
        has_mrope: Whether `position_ids` `[3, n]` are kept.

    Returns:
        A new sample of n - 1 tokens; media that are there stay as they are.
    """
    ids, labels = token_row(sample, "input_ids"), token_row(sample, "labels")
    assert ids is not None  # noqa: S101 - the encoder's contract
    assert labels is not None  # noqa: S101
    mask = token_row(sample, "attention_mask")
    shifted: dict[str, Any] = {
        "input_ids": ids[:-1],
        "labels": labels[1:],
        "attention_mask": (torch.ones_like(ids) if mask is None else mask)[:-1],
    }
    for key in ("mm_token_type_ids", "token_type_ids"):
        row = token_row(sample, key)
        if row is not None:
            shifted[key] = row[:-1]
    if has_mrope and sample.get("position_ids") is not None:
        shifted["position_ids"] = sample["position_ids"][:, :-1]
    return shifted | {k: v for k, v in sample.items() if k not in TOKEN_KEYS and v is not None}
