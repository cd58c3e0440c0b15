"""Document numbers -> the 4-D mask of models that take no packed positions.

Enters: `[B, L]` document numbers, 0 for slots that nobody may see. Leaves: `[B, 1, L, L]`.
"""

from __future__ import annotations

import torch

__all__ = ["document_mask_4d"]


def document_mask_4d(document_mask: torch.Tensor, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Return which key each query may see: its own document, up to itself.

    A slot with number 0 sees itself alone, so that no row of the attention is empty (an empty softmax is NaN), and no
    other slot sees it.

    Args:
        document_mask: `[B, L]` Number of each slot's document.
        dtype: `torch.bool` (True: may be seen; for SDPA), or a floating type for a mask that is added to the scores
            (for eager attention, which would add the ones of a bool mask).

    Returns:
        `[B, 1, L, L]`, queries on axis 2.
    """
    length = document_mask.shape[-1]
    same = document_mask[:, :, None] == document_mask[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_mask.device).tril()
    alone = torch.eye(length, dtype=torch.bool, device=document_mask.device)
    seen = (same & causal & (document_mask > 0)[:, :, None] | alone)[:, None]
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
