"""Qwen2.5-VL: `pixel_values` as flat patches, `image_grid_thw`, `video_grid_thw`, `second_per_grid_ts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from vlm_stream.collate.examples import conversations_of, count_media, mask_fake_images
from vlm_stream.collate.process_batch import process_batch
from vlm_stream.collate.rows import shift

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["qwen2_5_collate_fn"]


def qwen2_5_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, pixels: Literal["full", "compact"] = "full"
) -> dict[str, Any]:
    """Collate conversations for Qwen2.5-VL.

    Args:
        examples: `{"conversation": [...]}`; media as paths, bytes or decoded objects.
        processor: The model's processor.
        pixels: `compact` leaves pixels as bytes for `finish_pixels`.

    Returns:
        The processor's batch with labels, all shifted by one token; pixels keep their dtype; media counts per row.
    """
    conversations = conversations_of(examples)
    batch = process_batch(conversations, processor, pixels=pixels)
    return shift(mask_fake_images(batch, examples, processor)) | count_media(conversations)
