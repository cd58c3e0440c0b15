"""Sides rounded to whole patches within pixel limits: the Qwen and GLM families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.tokens.resize import MAX_ASPECT_RATIO, PixelBox, resize_clip, smart_resize_image
from vlm_stream.tokens.rules.base import MediaCounts, name_aspect_problem

if TYPE_CHECKING:
    from vlm_stream.tokens.rules.base import Ints

__all__ = ["ClipGrid", "ClipGridImage", "FrameGrid", "PatchGrid"]

_CAP_SHARE = 0.9  # of the context, that a capped Qwen2-VL clip may fill
_CAP_FLOOR = 1.05  # a cap never goes below the smallest area by less than this factor


def _stack_grid(layers: Ints, high: Ints, wide: Ints, patch: int) -> Ints:
    """Return [m, 3]: layers, and patches along the height and the width of each."""
    return np.stack([layers, high // patch, wide // patch], axis=1)


def _count_grid(grids: Ints, merge: int) -> MediaCounts:
    """Count grids [m, 3]."""
    layers, per_layer = grids[:, 0], grids[:, 1] * grids[:, 2]
    return MediaCounts(layers * per_layer // merge**2, layers * per_layer, layers * per_layer.astype(np.float64) ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchGrid:
    """Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-Omni."""

    patch_size: int = 14
    """Pixels along a patch."""
    merge_size: int = 2
    """Patches along the square that becomes one token."""
    min_pixels: int = 3136
    """Smallest area."""
    max_pixels: int = 1003520
    """Largest area."""

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        return _count_grid(self.grid_images(heights, widths), self.merge_size)

    def grid_images(self, heights: Ints, widths: Ints) -> Ints:
        """Return `image_grid_thw` [m, 3]."""
        factor = self.patch_size * self.merge_size
        high, wide = smart_resize_image(heights, widths, factor, self.min_pixels, self.max_pixels)
        return _stack_grid(np.ones_like(heights), high, wide, self.patch_size)

    def find_problem(self, height: int, width: int) -> str | None:
        """Refuse extreme shapes."""
        return name_aspect_problem(height, width, MAX_ASPECT_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameGrid:
    """Videos of Qwen2-VL, Qwen2.5-VL and Qwen3-Omni: the limits hold for each frame."""

    patch_size: int = 14
    """Pixels along a patch."""
    merge_size: int = 2
    """Patches along the square that becomes one token."""
    temporal_patch_size: int = 2
    """Frames in a patch."""
    min_pixels: int = 100352
    """Smallest area of a frame."""
    max_pixels: int = 602112
    """Largest area of a frame."""
    capped_tokens: int | None = None
    """Context that long clips must share (`cap_pixels_per_frame`); None: no cap."""

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        """Count clips."""
        return _count_grid(self.grid_videos(frames, heights, widths), self.merge_size)

    def grid_videos(self, frames: Ints, heights: Ints, widths: Ints) -> Ints:
        """Return `video_grid_thw` [m, 3]."""
        factor = self.patch_size * self.merge_size
        most: int | Ints = self.max_pixels
        if self.capped_tokens is not None:
            budget = int(self.capped_tokens * factor * factor * _CAP_SHARE)
            share = budget * self.temporal_patch_size // np.maximum(frames, 1)
            most = np.maximum(np.minimum(self.max_pixels, share), int(self.min_pixels * _CAP_FLOOR))
        high, wide = smart_resize_image(heights, widths, factor, self.min_pixels, most)
        return _stack_grid(-(-frames // self.temporal_patch_size), high, wide, self.patch_size)

    def find_problem(self, height: int, width: int) -> str | None:
        """Refuse extreme shapes."""
        return name_aspect_problem(height, width, MAX_ASPECT_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipGrid:
    """Videos of Qwen3-VL and GLM-4.6V: the limits hold for the clip as a whole."""

    patch_size: int = 16
    """Pixels along a patch."""
    merge_size: int = 2
    """Patches along the square that becomes one token."""
    temporal_patch_size: int = 2
    """Frames in a patch."""
    min_pixels: int = 131072
    """Smallest volume."""
    max_pixels: int = 786432
    """Largest volume."""
    capped_tokens: int | None = None
    """Tokens that a frame may have (`cap_pixels_per_frame`); None: no cap."""

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        """Count clips."""
        return _count_grid(self.grid_videos(frames, heights, widths), self.merge_size)

    def grid_videos(self, frames: Ints, heights: Ints, widths: Ints) -> Ints:
        """Return `video_grid_thw` [m, 3]."""
        factor = self.patch_size * self.merge_size
        most: int | Ints = self.max_pixels
        if self.capped_tokens is not None:
            share = np.minimum(self.capped_tokens * factor * factor, self.max_pixels // np.maximum(frames, 1))
            most = np.maximum(share, int(self.min_pixels * _CAP_FLOOR)) * frames
        box = PixelBox(factor, self.min_pixels, most)
        high, wide = resize_clip(frames, heights, widths, self.temporal_patch_size, box)
        return _stack_grid(-(-frames // self.temporal_patch_size), high, wide, self.patch_size)

    def find_problem(self, height: int, width: int) -> str | None:
        """Refuse extreme shapes, which are measured after small sides were scaled up to a whole factor."""
        factor = self.patch_size * self.merge_size
        if 0 < min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return name_aspect_problem(height, width, MAX_ASPECT_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipGridImage:
    """Images of GLM-4.6V, which resizes them as clips of one temporal patch."""

    patch_size: int = 14
    """Pixels along a patch."""
    merge_size: int = 2
    """Patches along the square that becomes one token."""
    temporal_patch_size: int = 2
    """Frames in a patch."""
    min_pixels: int = 12544
    """Smallest volume."""
    max_pixels: int = 47040000
    """Largest volume."""

    def _clip(self) -> ClipGrid:
        return ClipGrid(
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        return _count_grid(self.grid_images(heights, widths), self.merge_size)

    def grid_images(self, heights: Ints, widths: Ints) -> Ints:
        """Return `image_grid_thw` [m, 3]."""
        return self._clip().grid_videos(np.full_like(heights, self.temporal_patch_size), heights, widths)

    def find_problem(self, height: int, width: int) -> str | None:
        """Refuse extreme shapes."""
        return self._clip().find_problem(height, width)
