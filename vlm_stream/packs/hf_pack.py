"""`build_hf_pack`: encoded samples -> one packed row for `model(**pack, use_cache=False)` of a transformers model.

Enters: unshifted samples and a position rule. Leaves: model inputs, nothing else. Two facts of transformers decide the
form, and neither of them is reported by an error when it is missed:

* It finds documents where positions restart, if there is no attention mask and no cache. Multi-axis families look for
  the restart in a fourth row, put before the three axes; with the three alone, documents see each other.
* Its loss shifts `labels` itself. So they stay unshifted, and the first label of each document is IGNORE, because the
  last token of the document before it would answer for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from vlm_stream.errors import BadSampleError, ConfigError, nearest_name
from vlm_stream.packs.fake_image import as_documents
from vlm_stream.packs.keys import IGNORE
from vlm_stream.packs.masks import document_mask_4d
from vlm_stream.packs.media import merge_media

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlm_stream.packs.keys import Sample

__all__ = ["ATTENTION_FORMS", "MASK_DTYPES", "Positions", "build_hf_pack"]

Positions: TypeAlias = "Callable[[Sample], torch.Tensor | None]"

MASK_DTYPES: Final = {"mask4d": torch.float32, "mask4d_bool": torch.bool}
ATTENTION_FORMS: Final = ("positions", *MASK_DTYPES)
"""How documents are kept apart: by restarting positions, an additive 4-D mask, or a bool 4-D mask (SDPA only)."""


def build_hf_pack(
    samples: Sequence[Sample],
    *,
    padding_idx: int = 0,
    positions: Positions | None = None,
    pad_to: int | None = None,
    hf_labels: bool = True,
    attention: str = "positions",
) -> dict[str, Any]:
    """Join encoded samples into one row whose documents train as if each were alone.

    Args:
        samples: Encoded samples, unshifted, in order.
        padding_idx: Token of padding slots.
        positions: `PositionRule` or `ModelPositions` for families with multi-axis positions; None for all others.
        pad_to: Length of the row; without it the row is as long as its documents.
        hf_labels: Labels for transformers' own loss. False: already shifted, for trainers whose loss does not.
        attention: One of `ATTENTION_FORMS`.

    Returns:
        `input_ids`, `labels` and token types `[1, L]`; `position_ids` `[4, 1, L]` with a rule, else `[1, L]`;
        `attention_mask` `[1, 1, L, L]` for the mask forms only; the media of all documents.

    Raises:
        BadSampleError: Nothing is left to pack, or it is more than `pad_to`.
    """
    if attention not in ATTENTION_FORMS:
        raise ConfigError(
            f"attention={attention!r} is no way to keep documents apart; {nearest_name(attention, ATTENTION_FORMS)}"
        )
    documents = as_documents([_with_positions(sample, positions) for sample in samples])
    length = sum(len(document["input_ids"]) for document in documents)
    if pad_to is not None and length > pad_to:
        raise BadSampleError(
            "fit",
            "pack_too_long",
            f"The {len(documents)} documents of a pack have {length} tokens, more than the {pad_to} of its row. "
            f"Raise the row length, or plan packs with the lengths of this processor.",
        )
    media = merge_media(documents)
    keys = [key for key in ("mm_token_type_ids", "token_type_ids") if any(key in document for document in documents)]
    rows = [_rows(document, keys, hf_labels) for document in documents]
    if pad_to is not None and length < pad_to:
        rows.append(padding_document(pad_to - length, padding_idx, keys, multi_axis=positions is not None))
    pack = {key: torch.cat([row[key] for row in rows], dim=-1) for key in rows[0]}
    pack = {key: value[:, None] if value.ndim == 2 else value[None] for key, value in pack.items()}
    if attention in MASK_DTYPES:
        numbers = [torch.full((len(row["input_ids"]),), d) for d, row in enumerate(rows, start=1)]
        pack["attention_mask"] = document_mask_4d(torch.cat(numbers)[None], MASK_DTYPES[attention])
    return pack | media


def padding_document(
    length: int, padding_idx: int, keys: Sequence[str], *, multi_axis: bool
) -> dict[str, torch.Tensor]:
    """Return slots that no document sees: a document of padding, without labels."""
    counted = torch.arange(length)
    return {
        "input_ids": torch.full((length,), padding_idx),
        "labels": torch.full((length,), IGNORE),
        "position_ids": counted.expand(4, -1) if multi_axis else counted,
        **{key: torch.zeros(length, dtype=torch.long) for key in keys},
    }


def _with_positions(sample: Sample, positions: Positions | None) -> dict[str, Any]:
    plain = {key: value for key, value in sample.items() if key != "position_ids"}
    return plain if positions is None else plain | {"position_ids": positions(sample)}


def _rows(document: Sample, keys: Sequence[str], hf_labels: bool) -> dict[str, torch.Tensor]:
    """Return the values along the tokens of one document."""
    length = len(document["input_ids"])
    labels, ignored = document["labels"], torch.full((1,), IGNORE)
    counted = torch.arange(length)
    axes = document.get("position_ids")
    return {
        "input_ids": document["input_ids"],
        "labels": torch.cat([ignored, labels[1:]] if hf_labels else [labels[1:], ignored]),
        "position_ids": counted if axes is None else torch.cat([counted[None], axes]),
        **{key: document.get(key, torch.zeros(length, dtype=torch.long)) for key in keys},
    }
