"""Lengths of the documents in a row: what variable-length attention kernels and THD layouts take.

Enters: lengths. Leaves: cumulative lengths and the fields of the THD format.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["align_up", "count_documents", "cu_seqlens", "thd_fields"]


def align_up(length: int, alignment: int) -> int:
    """Return the next multiple of the alignment; 0 stays 0."""
    return -(-length // alignment) * alignment


def cu_seqlens(seq_lens: Sequence[int]) -> torch.Tensor:
    """Return `[documents + 1]` int32: where each document begins, and where the last one ends."""
    return torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int32)


def count_documents(document_mask: torch.Tensor) -> list[int]:
    """Return the lengths of the documents 1, 2, ... of one row's numbers, padding (0) left out."""
    numbers, counts = torch.unique_consecutive(document_mask[document_mask > 0], return_counts=True)
    return [int(n) for n in counts] if len(numbers) else []


def thd_fields(pack: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a THD attention takes beside the tokens of one packed sample, its padding slots included.

    `cu_seqlens` count the real tokens of each document and `cu_seqlens_padded` its slots, which differ where documents
    are aligned.
    """
    return {
        "qkv_format": "thd",
        "cu_seqlens": cu_seqlens(pack["seq_lens"]),
        "cu_seqlens_padded": cu_seqlens(pack["seq_lens_padded"]),
        "max_seqlen": max(pack["seq_lens_padded"]),
    }
