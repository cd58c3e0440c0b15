"""How the lengths of this run are counted: the processor's geometry with the user's frame rule, and the fake image."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.encode import inject_fake_image
from vlm_stream.tokens import FAKE_IMAGE_SIZE, ImageSize, MediaSizes, TextCounter, fake_image_tokens

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.options import StreamOptions
    from vlm_stream.tokens import Geometry, MediaColumns

__all__ = ["apply_frame_options", "count_fake_image", "num_media"]


def apply_frame_options(geometry: Geometry, options: StreamOptions) -> Geometry:
    """Return the geometry with the frames that this run reads of videos."""
    changes = {name: getattr(options, name) for name in ("fps", "max_frames") if getattr(options, name) is not None}
    return replace(geometry, frames=replace(geometry.frames, **changes)) if changes else geometry


def count_fake_image(processor: Any, geometry: Geometry) -> int:
    """Return by how many tokens the invisible image lengthens a text-only sample, the text around it included."""
    plain = [{"role": "user", "content": [{"type": "text", "text": "-"}]}]
    height, width = FAKE_IMAGE_SIZE
    counter = TextCounter(processor)
    without = counter.count(plain, MediaSizes())
    faked = counter.count(inject_fake_image(plain), MediaSizes(images=(ImageSize(height=height, width=width),)))
    return faked - 1 + fake_image_tokens(geometry) - without


def num_media(columns: MediaColumns) -> npt.NDArray[np.int64]:
    """Return [n] how many media each sample has."""
    splits = (columns.image_splits, columns.video_splits, columns.audio_splits)
    counts: npt.NDArray[np.int64] = np.sum([np.diff(split) for split in splits], axis=0)
    return counts
