"""Several conversations through one call of the processor, and labels for every row.

Enters: conversations (media as paths, bytes or decoded objects) and the processor. Leaves: the padded batch as the
processor gives it, plus `labels` [B, S] that are not shifted yet. Which keys a family wants is not known here. Inputs
are never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from vlm_stream.collate.join_media import join_media
from vlm_stream.collate.rows import pad_id_of, pad_rows, split_rows
from vlm_stream.encode import IGNORE, SHARED_PIXELS, EncodeConfig, Encoder, load_media, tokenizer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.conversation import Conversation
    from vlm_stream.encode import LoadedMedia, Rendered, TypedMarkers

__all__ = ["Prepared", "label_rows", "prepare", "process_batch"]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One conversation, its media decoded and its text rendered."""

    conversation: Conversation
    rendered: Rendered
    markers: TypedMarkers | None
    loaded: LoadedMedia


def prepare(encoder: Encoder, conversation: Conversation) -> Prepared:
    """Decode and render one conversation."""
    loaded = load_media(conversation, {}, encoder.config, encoder.reads)
    rendered, markers = encoder.render(conversation)
    return Prepared(conversation, rendered, markers, loaded)


def process_batch(
    conversations: Sequence[Conversation],
    processor: Any,
    options: Mapping[str, Any] | None = None,
    *,
    flat_images: bool = False,
    pixels: Literal["full", "compact"] = "full",
) -> dict[str, Any]:
    """Return the processor's batch with labels; rows are padded on the side that the tokenizer pads on.

    `options` go to the processor; `flat_images` passes the images of all rows as one list instead of a list per row;
    `pixels` is that of `EncodeConfig`.
    """
    encoder = Encoder(processor, EncodeConfig(allow_unlabelled=True, pixels=pixels))
    prepared = [prepare(encoder, conversation) for conversation in conversations]
    if type(processor).__name__ in SHARED_PIXELS and _mixes_media(prepared):
        rows = [encoder.encode(p.conversation, {}) for p in prepared]
        return pad_rows(rows, pad_id=pad_id_of(processor), side=_side(processor)) | join_media(rows)
    texts = [p.rendered.text for p in prepared]
    wanted = {"padding": True, **(options or {})}
    images = [image for p in prepared for image in p.loaded.images]
    if flat_images and images:
        wanted["images"] = images
    batch = encoder.call(texts, [p.loaded for p in prepared], wanted)
    if any(p.markers is not None for p in prepared):
        batch |= _splice_rows(encoder, batch, prepared)
    batch["labels"] = label_rows(encoder, batch, prepared)
    return batch


def label_rows(encoder: Encoder, batch: Mapping[str, Any], prepared: Sequence[Prepared]) -> torch.Tensor:
    """Return labels [B, S], padding IGNORE."""
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    labels = torch.full_like(ids, IGNORE)
    for row, p in enumerate(prepared):
        labels[row, mask[row]] = encoder.label(p.conversation, p.rendered, ids[row][mask[row]])
    return labels


def _splice_rows(encoder: Encoder, batch: Mapping[str, Any], prepared: Sequence[Prepared]) -> dict[str, torch.Tensor]:
    """Write typed control strings as plain text in the rows that hold some, and pad all rows anew."""
    rows = [
        encoder.splice(row, p.rendered, p.markers) if p.markers is not None else row
        for row, p in zip(split_rows(batch), prepared, strict=True)
    ]
    return pad_rows(rows, pad_id=pad_id_of(encoder.processor), side=_side(encoder.processor))


def _side(processor: Any) -> str:
    return str(getattr(tokenizer_of(processor), "padding_side", "right"))


def _mixes_media(prepared: Sequence[Prepared]) -> bool:
    return any(p.loaded.images for p in prepared) and any(p.loaded.videos for p in prepared)
