"""A grid of patches inside a budget: Nemotron-H-Omni."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.tokens.rules.base import MediaCounts

if TYPE_CHECKING:
    from vlm_stream.tokens.rules.base import Floats, Ints

__all__ = ["BudgetedImage", "TargetedVideo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedImage:
    """Images: near their own patch grid, scaled into the limits."""

    patch_size: int = 16
    """Pixels along a patch."""
    merge_size: int = 2
    """Patches along the square that becomes one token."""
    min_patches: int = 1024
    """Least patches."""
    max_patches: int = 13312
    """Most patches; 0: no limit but the context."""
    context_tokens: int = 16384
    """Length of the model's context, which all images of a call may fill."""

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        """Count images."""
        most = np.maximum((self.context_tokens - 4) * self.merge_size**2, self.min_patches * siblings)
        if self.max_patches:
            most = np.minimum(most, self.max_patches)
        most = np.maximum(most, self.min_patches).astype(np.float64)
        high, wide = np.rint(heights / self.patch_size + 0.5), np.rint(widths / self.patch_size + 0.5)
        shrink = np.minimum(np.sqrt(most / np.maximum(high * wide, 1)), 1.0)
        high, wide = np.floor(shrink * high), np.floor(shrink * wide)
        grow = np.sqrt(self.min_patches / np.maximum(high * wide, 1))
        is_small = (most > self.min_patches) & (high * wide < self.min_patches)
        high, wide = np.where(is_small, np.ceil(grow * high), high), np.where(is_small, np.ceil(grow * wide), wide)
        high = self._to_whole_tokens(high, wide, most)
        wide = self._to_whole_tokens(wide, high, most)
        patches = (high * wide).astype(np.int64)
        return MediaCounts(patches // self.merge_size**2, patches, patches.astype(np.float64) ** 2)

    def _to_whole_tokens(self, side: Floats, other: Floats, most: Floats) -> Floats:
        """Round a side up to whole tokens where the budget allows it, else down."""
        surplus = side % self.merge_size
        raised = side + self.merge_size - surplus
        lowered = np.maximum(self.merge_size, side - surplus)
        return np.where(surplus == 0, side, np.where(raised * other <= most, raised, lowered))

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetedVideo:
    """Videos: every frame near one number of patches; a few frames become one layer of tokens."""

    merge_size: int = 2
    """Patches along the square that becomes one token."""
    target_patches: int = 1024
    """Patches of a frame, about."""
    keep_shape: bool = True
    """Whether frames keep their shape or become squares."""
    temporal_patch_size: int = 2
    """Frames in a layer."""

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        """Count clips."""
        patches = self._count_patches(heights, widths)
        layers = -(-frames // self.temporal_patch_size)
        tokens = layers * (patches // self.merge_size**2)
        return MediaCounts(tokens, frames * patches, frames * patches.astype(np.float64) ** 2)

    def _count_patches(self, heights: Ints, widths: Ints) -> Ints:
        merge, target = self.merge_size, self.target_patches
        if not self.keep_shape:
            side = max(merge, int(target**0.5) // merge * merge)
            return np.full_like(heights, side * side)
        shape = np.maximum(widths, 1) / np.maximum(heights, 1)
        high = np.maximum(np.rint(np.sqrt(target / shape)), 1).astype(np.int64)
        wide = np.maximum(np.rint(np.sqrt(target * shape)), 1).astype(np.int64)
        if merge > 1:
            raised = [side + -side % merge for side in (high, wide)]
            lowered = [np.maximum(merge, side - side % merge) for side in (high, wide)]
            fits = raised[0] * raised[1] <= target
            high, wide = np.where(fits, raised[0], lowered[0]), np.where(fits, raised[1], lowered[1])
        patches: Ints = high * wide
        return patches

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None
