"""Packed rows for `model(**batch, use_cache=False)` of a transformers model.

Enters: unshifted samples and a position rule. Leaves: one row (`build_hf_pack`), or a batch of rows (`join_hf_packs`):
model inputs, nothing else. Two facts of transformers decide the form; when they are missed, no error says so:

* It finds documents where positions restart, if there is no attention mask and no cache. Multi-axis families look for
  the restart in a fourth row, put before the three axes; with the three alone, documents see each other.
* Its loss shifts `labels` itself. So they stay unshifted, and the first label of each document is IGNORE, because the
  last token of the document before it would be trained to predict it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from vlm_stream.collate.documents import as_documents, document_mask_4d
from vlm_stream.collate.media import count_media, merge_media
from vlm_stream.errors import BadSampleError, ConfigError, nearest_name
from vlm_stream.keys import IGNORE, POSITIONS_KEY, TOKEN_KEYS, Sample

Positions: TypeAlias = Callable[[Sample], torch.Tensor | None]
"""A position rule: encoded sample -> `[3, length]`."""

_AXES: Final = 3
_TYPE_KEYS: Final = ("mm_token_type_ids", "token_type_ids")
_MASK_DTYPES: Final = {"mask4d": torch.float32, "mask4d_bool": torch.bool}
ATTENTION_FORMS: Final = ("positions", *_MASK_DTYPES)
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
        attention: One of `ATTENTION_FORMS`. The mask forms are for plain causal models: a mask that is given replaces
            sliding windows and attention within images.

    Returns:
        `input_ids`, `labels` and token types `[1, L]`; `position_ids` `[4, 1, L]` with a rule, else `[1, L]`;
        `attention_mask` `[1, 1, L, L]` for the mask forms only; the media of all documents.

    Raises:
        BadSampleError: Nothing is left to pack, or it is more than `pad_to`.
    """
    _check_attention(attention, samples)
    documents = as_documents([_with_positions(sample, positions) for sample in samples])
    missing = 0 if pad_to is None else _missing(documents, pad_to)
    type_keys = [key for key in _TYPE_KEYS if any(key in document for document in documents)]
    rows = _join_documents(documents, type_keys, hf_labels)
    if missing:
        padding = _padding_row(missing, padding_idx, type_keys, multi_axis=POSITIONS_KEY in documents[0])
        rows = {key: torch.cat([row, padding[key]], dim=-1) for key, row in rows.items()}
    pack = {key: row.unsqueeze(-2) for key, row in rows.items()}
    if attention in _MASK_DTYPES:
        lengths = torch.tensor([*(len(document["input_ids"]) for document in documents), missing])
        numbers = torch.arange(1, len(lengths) + 1).repeat_interleave(lengths)
        pack["attention_mask"] = document_mask_4d(numbers[None], _MASK_DTYPES[attention])
    return pack | merge_media(documents)


def _check_attention(attention: str, samples: Sequence[Sample]) -> None:
    if attention not in ATTENTION_FORMS:
        raise ConfigError(
            f"attention={attention!r} is no way to keep documents apart; {nearest_name(attention, ATTENTION_FORMS)}"
        )
    if attention in _MASK_DTYPES and any(sample.get("token_type_ids") is not None for sample in samples):
        raise ConfigError(
            f"attention={attention!r} says that a token sees what is before it, and samples with token_type_ids are "
            f"of a family whose image tokens see each other; it would train another model. Use "
            f"attention='positions'."
        )


def _with_positions(sample: Sample, positions: Positions | None) -> dict[str, Any]:
    axes = None if positions is None else positions(sample)
    if axes is not None and axes.shape[0] != _AXES:
        raise ConfigError(
            f"The position rule gave {axes.shape[0]} rows per token, and models find documents only beside {_AXES} of "
            f"them (time, height, width). Do not pack this family."
        )
    if axes is not None:
        return {**sample, POSITIONS_KEY: axes}
    return {key: value for key, value in sample.items() if key != POSITIONS_KEY}


def _missing(documents: Sequence[Sample], pad_to: int) -> int:
    """Return how many slots of the row are left for padding."""
    length = sum(len(document["input_ids"]) for document in documents)
    if length > pad_to:
        raise BadSampleError(
            "fit",
            "pack_too_long",
            f"The {len(documents)} documents of a pack have {length} tokens, more than the {pad_to} of its row. "
            f"Raise the row length, or plan packs with the lengths of this processor.",
        )
    return pad_to - length


def _join_documents(documents: Sequence[Sample], type_keys: Sequence[str], hf_labels: bool) -> dict[str, torch.Tensor]:
    """Return the values along the tokens of all documents: a pack of short texts has many of them."""
    lengths = torch.tensor([document["input_ids"].numel() for document in documents])
    ends = lengths.cumsum(0)
    total = int(ends[-1])
    labels = torch.cat([document["labels"] for document in documents])
    if hf_labels:
        labels[ends - lengths] = IGNORE
    else:
        labels = labels.roll(-1)
        labels[ends - 1] = IGNORE
    counted = torch.arange(total) - (ends - lengths).repeat_interleave(lengths, output_size=total)
    row = {"input_ids": torch.cat([document["input_ids"] for document in documents]), "labels": labels}
    row[POSITIONS_KEY] = counted
    if any(POSITIONS_KEY in document for document in documents):
        axes = torch.cat([document[POSITIONS_KEY] for document in documents], dim=1)
        row[POSITIONS_KEY] = torch.cat([counted[None], axes])
    for key in type_keys:
        row[key] = torch.cat([document.get(key, torch.zeros_like(document["input_ids"])) for document in documents])
    return row


def _padding_row(
    length: int, padding_idx: int, type_keys: Sequence[str], *, multi_axis: bool
) -> dict[str, torch.Tensor]:
    """Return slots that no document sees: a document of padding, without labels."""
    counted = torch.arange(length)
    return {
        "input_ids": torch.full((length,), padding_idx),
        "labels": torch.full((length,), IGNORE),
        POSITIONS_KEY: counted.expand(1 + _AXES, -1) if multi_axis else counted,
        **{key: torch.zeros(length, dtype=torch.long) for key in type_keys},
    }


def join_hf_packs(
    packs: Sequence[Sample], *, padding_idx: int = 0, pad_to: int | None = None, media_counts: bool = False
) -> dict[str, Any]:
    """Stack packed rows into one batch; padding is one more document, without labels, that no other document sees.

    Args:
        packs: Rows of `build_hf_pack`, of one family and one attention form.
        padding_idx: Token of padding slots.
        pad_to: Length of the rows; that of the longest pack if it is not given.
        media_counts: Whether to add `n_images_per_sample` and `n_videos_per_sample` `[B]`, by which `pp_media` cuts.

    Returns:
        `[B, L]` tokens, labels and types, `[4, B, L]` or `[B, L]` positions, a `[B, 1, L, L]` mask if the packs have
        one, and all media.
    """
    if not packs:
        raise ConfigError(
            "A batch of no packs cannot be made, so there is nothing to train on; give at least one pack."
        )
    forms = {tuple(sorted(key for key in (*TOKEN_KEYS, POSITIONS_KEY) if key in pack)) for pack in packs}
    if len(forms) > 1:
        raise ConfigError(
            f"The packs of one batch hold different model inputs ({' against '.join(map(str, sorted(forms)))}), so "
            f"they cannot be stacked. Build them with the same attention form and processor."
        )
    longest = max(pack["input_ids"].shape[1] for pack in packs)
    length = longest if pad_to is None else pad_to
    if longest > length:
        raise BadSampleError(
            "fit", "pack_too_long", f"A pack has {longest} tokens, more than the {length} of its batch's rows."
        )
    rows = [_pad_pack(pack, length, padding_idx) for pack in packs]
    if len(rows) == 1:
        batch = rows[0]
    else:
        # A pack's own axis is the last but one: [1, L], or [4, 1, L] for positions; masks are [1, 1, L, L].
        axes = {key: 0 if key == "attention_mask" else -2 for key in rows[0]}
        batch = {key: torch.cat([row[key] for row in rows], dim=axis) for key, axis in axes.items()}
    return batch | (count_media(packs) if media_counts else {}) | merge_media(packs)


def _pad_pack(pack: Sample, length: int, padding_idx: int) -> dict[str, torch.Tensor]:
    """Return the values along the tokens of one pack at its full length."""
    type_keys = [key for key in _TYPE_KEYS if key in pack]
    missing = length - pack["input_ids"].shape[1]
    row = {key: pack[key] for key in ("input_ids", "labels", POSITIONS_KEY, *type_keys)}
    if missing:
        fill = _padding_row(missing, padding_idx, type_keys, multi_axis=pack[POSITIONS_KEY].ndim == 3)
        row = {key: torch.cat([row[key], value.unsqueeze(-2)], dim=-1) for key, value in fill.items()}
    mask = pack.get("attention_mask")
    return row if mask is None else row | {"attention_mask": _grow(mask, length)}


def _grow(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return the 4-D mask with slots added that see themselves alone."""
    grown = document_mask_4d(torch.zeros(1, length, dtype=torch.long), mask.dtype)
    grown[..., : mask.shape[-1], : mask.shape[-1]] = mask
    return grown
