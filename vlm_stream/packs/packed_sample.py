"""`build_packed_vlm_sample`: shifted samples -> one packed sample, for trainers that take document masks or THD.

Enters: samples of `shift_sample`. Leaves: one row with document numbers as its attention mask, positions that restart
in every document, the documents' lengths, and all media in order. It is not padded to the pack size: collation does
that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.packs.fake_image import as_documents
from vlm_stream.packs.keys import IGNORE, MEDIA_KEYS
from vlm_stream.packs.lengths import align_up
from vlm_stream.packs.media import merge_media

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.packs.keys import Sample

__all__ = ["build_packed_vlm_sample"]


def build_packed_vlm_sample(
    samples: Sequence[Sample],
    pack_size: int,
    padding_idx: int,
    has_mrope: bool = False,
    sequence_alignment: int = 1,
) -> dict[str, Any]:
    """Join shifted samples into one row.

    Args:
        samples: What `shift_sample` returned, in order.
        pack_size: The most tokens that the row may have.
        padding_idx: Token of the slots that align a document.
        has_mrope: Whether samples carry `position_ids` `[3, n]`.
        sequence_alignment: Every document is padded to a multiple of it, as context parallelism wants.

    Returns:
        `input_ids`, `labels`, `attention_mask` (document numbers from 1), `mm_token_type_ids` `[L]`; `position_ids`
        `[L]`, or `[3, L]` with mRoPE; `seq_lens`, `seq_lens_padded`; `n_images`, `n_videos`; every one of `MEDIA_KEYS`,
        None where there is none.

    Raises:
        BadSampleError: Nothing is left to pack, or it is more than `pack_size`.
    """
    if sequence_alignment < 1:
        raise ConfigError(f"sequence_alignment is {sequence_alignment}, which aligns nothing; give 1 or more.")
    documents = as_documents(samples)
    seq_lens = [len(document["input_ids"]) for document in documents]
    padded = [align_up(length, sequence_alignment) for length in seq_lens]
    if sum(padded) > pack_size:
        raise BadSampleError(
            "fit",
            "pack_too_long",
            f"The {len(documents)} documents of a pack have {sum(padded)} tokens ({padded}), more than pack_size "
            f"{pack_size}; the row would not fit its batch. Plan with a packing_ratio below 1, or leave one out.",
        )
    mrope = has_mrope and any("position_ids" in document for document in documents)
    rows = [_align(document, slots, padding_idx, mrope) for document, slots in zip(documents, padded, strict=True)]
    media = merge_media(documents)
    return {
        **{key: torch.cat([row[key] for row in rows]) for key in ("input_ids", "labels", "mm_token_type_ids")},
        "attention_mask": torch.cat([torch.full((slots,), d) for d, slots in enumerate(padded, start=1)]),
        "position_ids": torch.cat([row["position_ids"] for row in rows], dim=-1),
        "seq_lens": seq_lens,
        "seq_lens_padded": padded,
        "n_images": len(media.get("image_grid_thw", ())),
        "n_videos": len(media.get("video_grid_thw", ())),
        **dict.fromkeys(MEDIA_KEYS),
        **media,
    }


def _align(document: Sample, slots: int, padding_idx: int, mrope: bool) -> dict[str, torch.Tensor]:
    """Return the rows of one document, padded to its slots; positions count on through the padding."""
    length = len(document["input_ids"])
    fills = {"input_ids": padding_idx, "labels": IGNORE, "mm_token_type_ids": 0}
    absent = torch.zeros(length, dtype=torch.long)
    rows = {key: _pad(document.get(key, absent).long(), slots, fill) for key, fill in fills.items()}
    rows["position_ids"] = torch.arange(slots)
    if mrope:
        own = document.get("position_ids")
        own = torch.arange(length).expand(3, -1) if own is None else own.long()
        beyond = torch.arange(slots - length) + (int(own.max()) + 1 if length else 0)
        rows["position_ids"] = torch.cat([own, beyond.expand(3, -1)], dim=1)
    return rows


def _pad(row: torch.Tensor, slots: int, fill: int) -> torch.Tensor:
    return torch.cat([row, torch.full((slots - len(row),), fill)])
