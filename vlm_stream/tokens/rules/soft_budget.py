"""As large as a budget of soft tokens allows, shape kept: Gemma-4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.tokens.rules.base import MediaCounts

if TYPE_CHECKING:
    from vlm_stream.tokens.rules.base import Ints

__all__ = ["SoftBudget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftBudget:
    """Images, and the frames of videos, of Gemma-4."""

    patch_size: int = 16
    """Pixels along a patch."""
    pooling_size: int = 3
    """Patches along the square that becomes one token."""
    max_tokens: int = 280
    """The budget of an image or a frame."""

    def _count_tokens(self, heights: Ints, widths: Ints) -> Ints:
        step = self.pooling_size * self.patch_size
        h, w = np.maximum(heights, 1).astype(np.float64), np.maximum(widths, 1).astype(np.float64)
        scale = np.sqrt((self.max_tokens * self.pooling_size**2 * self.patch_size**2) / (h * w))
        high, wide = np.floor(scale * h / step), np.floor(scale * w / step)
        # A side that rounds to nothing becomes one token wide; the other then follows the shape of the image.
        long_wide, long_high = (np.minimum(np.floor(ratio), self.max_tokens) for ratio in (w / h, h / w))
        high, wide = (
            np.where(high == 0, 1, np.where(wide == 0, long_high, high)),
            np.where(high == 0, long_wide, np.where(wide == 0, 1, wide)),
        )
        tokens: Ints = (high * wide).astype(np.int64)
        return tokens

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        return self.count_videos(np.ones_like(heights), heights, widths)

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        """Count clips, frame by frame."""
        tokens = self._count_tokens(heights, widths)
        patches = tokens * self.pooling_size**2
        return MediaCounts(frames * tokens, frames * patches, frames * patches.astype(np.float64) ** 2)

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None
