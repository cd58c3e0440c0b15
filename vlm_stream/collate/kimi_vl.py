"""Kimi-VL: images only; the processor is remote code that takes all images of a batch as one flat list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlm_stream.collate.examples import conversations_of, count_media, drop_overlong, mask_fake_images
from vlm_stream.collate.process_batch import process_batch
from vlm_stream.collate.rows import cut_rows, pad_id_of, pad_to, shift

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["kimi_vl_collate_fn"]


def kimi_vl_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None
) -> dict[str, Any]:
    """Collate conversations for Kimi-VL.

    Args:
        examples: `{"conversation": [...]}`.
        processor: The model's processor.
        max_length: Rows that are estimated to be longer are dropped, the others padded to this many tokens.

    Returns:
        The processor's batch with shifted labels and image counts per row.
    """
    conversations = conversations_of(examples)
    if max_length is not None:
        conversations, kept = drop_overlong(conversations, processor, max_length)
        examples = [examples[index] for index in kept]
    batch = process_batch(conversations, processor, {"add_special_tokens": False}, flat_images=True)
    if max_length is not None:
        batch = pad_to(cut_rows(batch, max_length, processor), max_length, pad_id_of(processor))
    return shift(mask_fake_images(batch, examples, processor)) | count_media(conversations)
