"""The image that text-only samples carry so that every rank runs its vision tower, out of the way of their text.

Enters: encoded samples; where a sample is fake-imaged, its attention mask is 0 on the image's tokens. Leaves: documents
without these tokens, and at most one fake image as a document of its own at the end of the pack. Other documents cannot
see it there, with masks, packed positions and variable-length kernels alike, so that a text-only sample trains exactly
as if it had no image. A pack with real media runs the vision tower anyway and needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.errors import BadSampleError
from vlm_stream.packs.keys import IGNORE, TOKEN_KEYS, token_row
from vlm_stream.packs.media import media_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.packs.keys import Sample

__all__ = ["as_documents"]


def as_documents(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the documents of a pack: the visible tokens of each sample, then the fake image if the pack needs it.

    Raises:
        BadSampleError: No token is left (`empty_pack`), or a sample hides some of its media and shows others.
    """
    documents: list[dict[str, Any]] = []
    fakes: list[dict[str, Any]] = []
    for sample in samples:
        document, fake = _part(sample)
        documents += [document] if len(document["input_ids"]) else []
        fakes += [fake] if fake is not None and media_of(fake) else []
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


def _part(sample: Sample) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the visible document of a sample, and its hidden fake image if it has one."""
    mask = token_row(sample, "attention_mask")
    if mask is None or bool(mask.all()):
        return _only(sample, slice(None)) | media_of(sample), None
    visible = mask.bool()
    types = token_row(sample, "mm_token_type_ids")
    if types is not None and bool((types[visible] > 0).any()):
        raise BadSampleError(
            "encode",
            "partly_hidden_media",
            f"A sample hides {int((~visible).sum())} tokens and shows media tokens, so its media cannot be told apart "
            f"from a fake image. Only samples without media of their own may carry one.",
        )
    fake = _only(sample, ~visible) | media_of(sample)
    length = len(fake["input_ids"])
    fake["labels"] = torch.full((length,), IGNORE)
    if "position_ids" in fake:
        fake["position_ids"] = torch.arange(length).expand(3, -1)
    return _only(sample, visible), fake


def _only(sample: Sample, chosen: Any) -> dict[str, Any]:
    """Return the chosen tokens of a sample, as rows without a batch axis and without an attention mask."""
    rows = {key: token_row(sample, key) for key in TOKEN_KEYS if key not in ("attention_mask", "position_ids")}
    kept: dict[str, Any] = {key: row[chosen] for key, row in rows.items() if row is not None}
    if sample.get("position_ids") is not None:
        kept["position_ids"] = sample["position_ids"][:, chosen]
    return kept
