"""Never enlarged, scaled down to a patch limit, padded to whole tokens: Kimi-K2.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.tokens.rules.base import MediaCounts

if TYPE_CHECKING:
    from vlm_stream.tokens.rules.base import Ints

__all__ = ["NavitImage", "NavitVideo"]


def _count_patches(heights: Ints, widths: Ints, rule: NavitImage | NavitVideo) -> Ints:
    patch, longest = rule.patch_size, rule.max_side_patches * rule.patch_size
    h, w = np.maximum(heights, 1).astype(np.float64), np.maximum(widths, 1).astype(np.float64)
    current = np.maximum(1.0, heights // patch) * np.maximum(1.0, widths // patch)
    scale = np.minimum(np.minimum(1.0, np.sqrt(rule.max_patches / current)), np.minimum(longest / h, longest / w))
    sides = [np.minimum(np.maximum(1, np.trunc(side * scale)), longest).astype(np.int64) for side in (h, w)]
    factor = rule.merge_size * patch
    high, wide = (-(-side // factor) * factor // patch for side in sides)
    patches: Ints = high * wide
    return patches


@dataclass(frozen=True, slots=True, kw_only=True)
class NavitImage:
    """Images."""

    patch_size: int = 14
    """Pixels along a patch."""
    merge_size: int = 2
    """Patches along the square that becomes one token."""
    max_patches: int = 16384
    """Most patches."""
    max_side_patches: int = 512
    """Most patches along a side."""

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        patches = _count_patches(heights, widths, self)
        return MediaCounts(patches // self.merge_size**2, patches, patches.astype(np.float64) ** 2)

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NavitVideo:
    """Videos, cut into chunks of a few frames; a chunk costs the tokens of one frame."""

    patch_size: int = 14
    """Pixels along a patch."""
    merge_size: int = 2
    """Patches along the square that becomes one token."""
    max_patches: int = 4096
    """Most patches of a frame."""
    max_side_patches: int = 512
    """Most patches along a side."""
    temporal_patch_size: int = 4
    """Frames in a chunk."""

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        """Count clips."""
        patches = _count_patches(heights, widths, self)
        chunks = -(-frames // self.temporal_patch_size)
        tokens = chunks * (patches // self.merge_size**2)
        return MediaCounts(tokens, frames * patches, frames * patches.astype(np.float64) ** 2)

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None
