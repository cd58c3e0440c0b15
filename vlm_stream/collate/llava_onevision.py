"""LLaVA-OneVision: tiles per image, `image_sizes`, `batch_num_images`, `pixel_values_videos`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlm_stream.collate.examples import conversations_of, count_media, mask_fake_images
from vlm_stream.collate.process_batch import process_batch
from vlm_stream.collate.rows import shift

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["llava_onevision_collate_fn"]


def llava_onevision_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
    """Collate conversations for LLaVA-OneVision; labels shifted, pixels as the processor gives them."""
    conversations = conversations_of(examples)
    batch = process_batch(conversations, processor)
    return shift(mask_fake_images(batch, examples, processor)) | count_media(conversations)
