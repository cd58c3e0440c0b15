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
    batch, length = document_mask.shape
    hidden, visible = (False, True) if dtype == torch.bool else (torch.finfo(dtype).min, 0.0)
    mask = torch.full((batch, 1, length, length), hidden, dtype=dtype, device=document_mask.device)
    mask.diagonal(dim1=-2, dim2=-1).fill_(visible)
    for row, numbers in enumerate(document_mask):
        # Only the blocks of documents are written: comparing all pairs of slots costs ten times as much.
        for number in numbers[numbers > 0].unique():
            at = (numbers == number).nonzero()[:, 0]
            below = torch.ones(len(at), len(at), dtype=torch.bool, device=at.device).tril().nonzero()  # [pairs, 2]
            mask[row, 0, at[below[:, 0]], at[below[:, 1]]] = visible
    return mask
