"""Sides rounded to whole patches within pixel limits: the Qwen and GLM families.

One implementation serves single media and whole index columns. All arithmetic is in float64 with Python's half-to-even
rounding, operation for operation as the processors do it, because one unit in the last place can move a border.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vlm_stream.tokens.rules import MAX_ASPECT_RATIO, Floats, Ints, MediaCounts, name_aspect_problem

Whole: TypeAlias = int | npt.NDArray[np.int64]

_CAP_SHARE = 0.9  # of the context, that a capped Qwen2-VL clip may fill
_CAP_FLOOR = 1.05  # a cap never goes below the smallest area by less than this factor


class PixelBox(NamedTuple):
    """What a size is fitted into."""

    factor: int  # both sides become multiples of it
    min_pixels: Whole  # smallest area, or volume of a clip
    max_pixels: Whole  # largest area, or volume of a clip


def smart_resize_image(
    height: Whole, width: Whole, factor: int = 28, min_pixels: Whole = 3136, max_pixels: Whole = 1003520
) -> tuple[Any, Any]:
    """Return the height and width that an image is resized to: ints for ints, int64 arrays for arrays.

    Sides are rounded to multiples of `factor` (patch size times merge size); where the area leaves the limits, both
    sides are scaled and rounded towards the inside. Aspect ratios are not checked here, see `check_media_sizes`.

    >>> smart_resize_image(1080, 1920)
    (728, 1316)
    """
    h, w = _sides(height), _sides(width)
    one = np.ones_like(h)
    return _fit((h, w), one, one, PixelBox(factor, min_pixels, max_pixels), scalar=np.ndim(height) == 0)


def smart_resize_video(
    num_frames: Whole,
    height: Whole,
    width: Whole,
    temporal_factor: int = 2,
    factor: int = 32,
    min_pixels: Whole = 16384,
    max_pixels: Whole = 12582912,
) -> tuple[Any, Any]:
    """Return the size that the frames of a clip are resized to, when the limits hold for the clip as a whole.

    The number of frames is rounded up to a multiple of `temporal_factor` for the comparison with the limits.

    >>> smart_resize_video(32, 1920, 1080)
    (832, 448)
    """
    n = _sides(num_frames)
    padded = np.ceil(n / temporal_factor) * temporal_factor
    h, w = _sides(height), _sides(width)
    return _fit((h, w), n, padded, PixelBox(factor, min_pixels, max_pixels), scalar=np.ndim(height) == 0)


def resize_clip(num_frames: Whole, height: Whole, width: Whole, temporal_factor: int, box: PixelBox) -> tuple[Any, Any]:
    """Return the size of a clip's frames as the processors of Qwen3-VL and GLM-4.6V compute it.

    It differs from `smart_resize_video` in two points: a side below `factor` is scaled up first, and the number of
    frames is rounded half to even, not up.

    >>> resize_clip(4, 5, 1000, 2, PixelBox(32, 131072, 786432))
    (32, 6240)
    """
    factor = box.factor
    n = _sides(num_frames)
    h, w = _sides(height), _sides(width)
    scale = np.maximum(factor / h, factor / w)
    is_small = (h < factor) | (w < factor)
    h, w = np.where(is_small, np.trunc(h * scale), h), np.where(is_small, np.trunc(w * scale), w)
    rounded = np.rint(n / temporal_factor) * temporal_factor
    return _fit((h, w), n, rounded, box, scalar=np.ndim(height) == 0)


def _sides(values: Whole) -> Floats:
    """Return float64; what is empty counts as 1, because one bad entry (refused elsewhere) must not stop a column."""
    return np.maximum(np.asarray(values, np.float64), 1.0)


def _fit(
    sides: tuple[Floats, Floats], frames: Floats, depth: Floats, box: PixelBox, *, scalar: bool
) -> tuple[Any, Any]:
    """Round sides and scale them into the box; `depth` is the number of frames as the comparison sees it."""
    h, w = sides
    factor = box.factor
    high, wide = np.rint(h / factor) * factor, np.rint(w / factor) * factor
    volume = depth * high * wide
    is_over, is_under = volume > box.max_pixels, volume < box.min_pixels
    true_volume = frames * h * w
    shrink = np.sqrt(true_volume / box.max_pixels)
    grow = np.sqrt(box.min_pixels / true_volume)
    smaller = [np.maximum(factor, np.floor(side / shrink / factor) * factor) for side in (h, w)]
    larger = [np.ceil(side * grow / factor) * factor for side in (h, w)]
    high = np.where(is_over, smaller[0], np.where(is_under, larger[0], high))
    wide = np.where(is_over, smaller[1], np.where(is_under, larger[1], wide))
    if scalar:
        return int(high), int(wide)
    return high.astype(np.int64), wide.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """What all rules of this file know."""

    patch_size: int = 14
    merge_size: int = 2  # patches along the square that becomes one token
    min_pixels: int  # smallest area of an image or frame; of a clip as a whole: smallest volume
    max_pixels: int  # largest area, or volume

    @property
    def _factor(self) -> int:
        return self.patch_size * self.merge_size

    def _stack(self, layers: Ints, sides: tuple[Any, Any]) -> Ints:
        """Return [m, 3]: layers, and patches along the height and the width of each."""
        return np.stack([layers, *(side // self.patch_size for side in sides)], axis=1)

    def _count(self, grids: Ints) -> MediaCounts:
        """Count grids [m, 3]."""
        layers, per_layer = grids[:, 0], grids[:, 1] * grids[:, 2]
        squares = layers * per_layer.astype(np.float64) ** 2
        return MediaCounts(layers * per_layer // self.merge_size**2, layers * per_layer, squares)

    def find_problem(self, height: int, width: int) -> str | None:
        return name_aspect_problem(height, width, MAX_ASPECT_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchGrid(_Grid):
    """Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and the Qwen Omni families."""

    min_pixels: int = 3136
    max_pixels: int = 1003520

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        return self._count(self.grid_images(heights, widths))

    def grid_images(self, heights: Ints, widths: Ints) -> Ints:
        limits = self._factor, self.min_pixels, self.max_pixels
        return self._stack(np.ones_like(heights), smart_resize_image(heights, widths, *limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class _VideoGrid(_Grid):
    temporal_patch_size: int = 2
    capped_tokens: int | None = None
    """With `cap_pixels_per_frame`: the context that long clips must share, or the tokens that a frame may have."""

    def grid_videos(self, frames: Ints, heights: Ints, widths: Ints) -> Ints:
        """Return `video_grid_thw` [m, 3]."""
        raise NotImplementedError

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        return self._count(self.grid_videos(frames, heights, widths))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameGrid(_VideoGrid):
    """Videos of Qwen2-VL, Qwen2.5-VL and the Qwen Omni families: the limits hold for each frame."""

    min_pixels: int = 100352
    max_pixels: int = 602112

    def grid_videos(self, frames: Ints, heights: Ints, widths: Ints) -> Ints:
        most: int | Ints = self.max_pixels
        if self.capped_tokens is not None:
            budget = int(self.capped_tokens * self._factor * self._factor * _CAP_SHARE)
            share = budget * self.temporal_patch_size // np.maximum(frames, 1)
            most = np.maximum(np.minimum(self.max_pixels, share), int(self.min_pixels * _CAP_FLOOR))
        sides = smart_resize_image(heights, widths, self._factor, self.min_pixels, most)
        return self._stack(-(-frames // self.temporal_patch_size), sides)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipGrid(_VideoGrid):
    """Videos of Qwen3-VL and GLM-4.6V: the limits hold for the clip as a whole. GLM-4.6V's images are clips, too."""

    patch_size: int = 16
    min_pixels: int = 131072
    max_pixels: int = 786432

    def grid_videos(self, frames: Ints, heights: Ints, widths: Ints) -> Ints:
        most: int | Ints = self.max_pixels
        if self.capped_tokens is not None:
            share = np.minimum(self.capped_tokens * self._factor**2, self.max_pixels // np.maximum(frames, 1))
            most = np.maximum(share, int(self.min_pixels * _CAP_FLOOR)) * frames
        box = PixelBox(self._factor, self.min_pixels, most)
        sides = resize_clip(frames, heights, widths, self.temporal_patch_size, box)
        return self._stack(-(-frames // self.temporal_patch_size), sides)

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        return self._count(self.grid_images(heights, widths))

    def grid_images(self, heights: Ints, widths: Ints) -> Ints:
        """Return the grids of clips of one layer."""
        return self.grid_videos(np.full_like(heights, self.temporal_patch_size), heights, widths)

    def find_problem(self, height: int, width: int) -> str | None:
        """Refuse extreme shapes, which are measured after small sides were scaled up to a whole factor."""
        if 0 < min(height, width) < self._factor:
            scale = max(self._factor / height, self._factor / width)
            height, width = int(height * scale), int(width * scale)
        return name_aspect_problem(height, width, MAX_ASPECT_RATIO)
