"""The documents of a packed row: which tokens they are, how long, and who may see whom.

Enters: encoded samples; document numbers `[B, S]` of a batch (0: padding) and a packing contract, in NeMo Automodel's
words: how a model learns which documents a row holds. Leaves: documents that cannot see each other, their lengths,
their attention mask or what stands in its place.

Text-only samples may carry a fake image, so that every rank runs its vision tower; their attention mask is 0 on its
tokens. Those tokens are taken out here, and at most one fake image becomes a document of its own at the end of the row.
Other documents cannot see it there, so a text-only sample trains exactly as if it had no image. A row with real media
runs the vision tower anyway and needs none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import torch

from vlm_stream.collate.media import media_of
from vlm_stream.collate.rows import token_row
from vlm_stream.errors import BadSampleError, ConfigError, nearest_name
from vlm_stream.keys import IGNORE, POSITIONS_KEY, TOKEN_KEYS, Sample

_Length = TypeVar("_Length", bound=Any)
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
"""Documents are kept apart by a mask."""
FLASH: Final = "flash_attention_"
"""How the names of attention implementations begin that take no mask."""


def as_documents(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the documents of a pack: the visible tokens of each sample, then the fake image if the pack needs it.

    Raises:
        BadSampleError: No token is left (`empty_pack`), or a sample hides some of its media and shows others.
    """
    documents: list[dict[str, Any]] = []
    fakes: list[dict[str, Any]] = []
    for sample in samples:
        document, fake = _take_fake_out(sample)
        if document["input_ids"].numel():
            documents.append(document)
        if fake is not None and media_of(fake):
            fakes.append(fake)
    if not documents:
        raise BadSampleError(
            "fit",
            "empty_pack",
            f"None of the {len(samples)} samples of a pack has a token to train on, so there is no row to make of "
            f"them. Give at least one sample with visible tokens.",
        )
    if fakes and not any(media_of(document) for document in documents):
        documents.append(fakes[0])
    return documents


def _take_fake_out(sample: Sample) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the visible document of a sample, and its hidden fake image if it has one."""
    mask = token_row(sample, "attention_mask")
    if mask is None or mask.numpy().all():
        return _choose(sample) | media_of(sample), None
    visible = mask.bool()
    types = token_row(sample, "mm_token_type_ids")
    if types is not None and bool((types[visible] > 0).any()):
        raise BadSampleError(
            "encode",
            "partly_hidden_media",
            f"A sample hides {int((~visible).sum())} tokens and shows media tokens, so its media cannot be told apart "
            f"from a fake image. Only samples without media of their own may carry one.",
        )
    fake = _choose(sample, ~visible) | media_of(sample)
    length = len(fake["input_ids"])
    fake["labels"] = torch.full((length,), IGNORE)
    if POSITIONS_KEY in fake:
        fake[POSITIONS_KEY] = torch.arange(length).expand(3, -1)
    return _choose(sample, visible), fake


def _choose(sample: Sample, chosen: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the chosen tokens of a sample, or all, as rows without a batch axis and without an attention mask."""
    kept: dict[str, Any] = {key: row for key in TOKEN_KEYS if (row := token_row(sample, key)) is not None}
    kept.pop("attention_mask", None)
    if sample.get(POSITIONS_KEY) is not None:
        kept[POSITIONS_KEY] = sample[POSITIONS_KEY]
    return kept if chosen is None else {key: row[..., chosen] for key, row in kept.items()}


def align_up(length: _Length, alignment: int) -> _Length:
    """Return the next multiple of the alignment, of a number or an array of them; 0 stays 0."""
    aligned: _Length = -(-length // alignment) * alignment
    return aligned


def cu_seqlens(seq_lens: Sequence[int]) -> torch.Tensor:
    """Return `[documents + 1]` int32: where each document begins, and where the last one ends."""
    return torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int32)


def count_documents(document_mask: torch.Tensor) -> list[int]:
    """Return the lengths of the documents 1, 2, ... of one row's numbers, padding (0) left out."""
    counts = torch.unique_consecutive(document_mask[document_mask > 0], return_counts=True)[1]
    return [int(n) for n in counts]


def document_mask_4d(document_mask: torch.Tensor, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Return which key each query may see: its own document, up to itself.

    A slot with number 0 (padding, hidden tokens) sees itself alone, so that no softmax is empty and therefore NaN; no
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
        # Only the blocks of documents are written; comparing all pairs of slots would cost far more.
        for number in numbers[numbers > 0].unique():
            at = (numbers == number).nonzero()[:, 0]
            block = torch.full((len(at), len(at)), visible, dtype=dtype, device=at.device)
            later = torch.ones_like(block, dtype=torch.bool).triu(1)
            mask[row, 0, at[:, None], at] = block.masked_fill_(later, hidden)
    return mask


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
