"""How a model learns which documents a packed row holds: NeMo Automodel's packing contracts.

Enters: the document numbers `[B, S]` of a batch (0: padding), and a contract. Leaves: a mask, or lengths in its place,
and what recurrent layers want besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import torch

from vlm_stream.collate.documents import count_documents, cu_seqlens, document_mask_4d
from vlm_stream.errors import ConfigError, nearest_name

PackedMaskType: TypeAlias = Literal["block_causal", "document_ids", "flash_varlen"]


@dataclass(frozen=True)
class PackingContract:
    """What a model wants to be told.

    Attributes:
        packed_mask_type: `block_causal`: a bool mask `[B, 1, S, S]` (SDPA and eager attention); `flash_varlen`:
            cumulative lengths for transformers' flash attention; `document_ids`: the numbers themselves.
        requires_packed_sequence_metadata: Add `packed_token_indices`, `cu_seqlens` and `max_seqlen`.
    """

    packed_mask_type: PackedMaskType = "block_causal"
    requires_packed_sequence_metadata: bool = False


BLOCK_CAUSAL: Final = PackingContract()

FLASH: Final = "flash_attention_"


def mask_documents(documents: torch.Tensor, form: PackedMaskType, dtype: torch.dtype = torch.bool) -> dict[str, Any]:
    """Return what tells the documents `[B, S]` apart, in one of the forms; `dtype` is that of a 4-D mask."""
    if form == "block_causal":
        return {"attention_mask": document_mask_4d(documents, dtype)}
    if form == "document_ids":
        return {"attention_mask": documents}
    if form != "flash_varlen":
        raise ConfigError(f"packed_mask_type is {form!r}; {nearest_name(str(form), get_args(PackedMaskType))}")
    # Padding is a document too: kernels take every slot of a batch.
    lengths = [int(n) for row in documents for n in torch.unique_consecutive(row, return_counts=True)[1]]
    offsets, longest = cu_seqlens(lengths), max(lengths)
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}


def sequence_metadata(documents: torch.Tensor) -> dict[str, Any]:
    """Return for each row which slots hold tokens, and where its documents begin; -1 where there is nothing."""
    lengths = [count_documents(row) for row in documents]
    slots = torch.arange(documents.shape[1]).expand_as(documents)
    offsets = torch.full((len(lengths), 1 + max(map(len, lengths))), -1, dtype=torch.int32)
    for row, own in enumerate(lengths):
        offsets[row, : len(own) + 1] = cu_seqlens(own)
    return {
        "packed_token_indices": torch.where(documents > 0, slots, -1),
        "cu_seqlens": offsets,
        "max_seqlen": max(max(own) for own in lengths),
    }
