"""Resize rules of the Qwen kind: enter heights and widths (numbers or arrays), leave multiples of a factor.

One implementation serves single media and whole index columns. All arithmetic is in float64 with Python's half-to-even
rounding, operation for operation as the processors do it, because one unit in the last place can move a border.
This file knows no processor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MAX_ASPECT_RATIO", "PixelBox", "resize_clip", "smart_resize_image", "smart_resize_video"]

Whole: TypeAlias = "int | npt.NDArray[np.int64]"
Limits: TypeAlias = "int | npt.NDArray[np.int64]"

MAX_ASPECT_RATIO = 200
"""The Qwen and GLM processors raise above it (200 itself passes)."""


class PixelBox(NamedTuple):
    """What a size is fitted into."""

    factor: int
    """Both sides become multiples of it."""
    min_pixels: Limits
    """Smallest area, or volume of a clip."""
    max_pixels: Limits
    """Largest area, or volume of a clip."""


def smart_resize_image(
    height: Whole, width: Whole, factor: int = 28, min_pixels: Limits = 3136, max_pixels: Limits = 1003520
) -> tuple[Any, Any]:
    """Return the size that an image is resized to.

    Sides are rounded to multiples of `factor`; where the area leaves the limits, both sides are scaled and rounded
    towards the inside. Aspect ratios are not checked here, see `check_media_sizes`.

    Args:
        height: A number or an array.
        width: A number or an array of the same shape.
        factor: Patch size times merge size.
        min_pixels: Smallest area.
        max_pixels: Largest area; an array gives each image its own.

    Returns:
        Height and width: two ints for ints, two int64 arrays for arrays.

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
    min_pixels: Limits = 16384,
    max_pixels: Limits = 12582912,
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

    Args:
        num_frames: Frames of the clip.
        height: Height of its frames.
        width: Width of its frames.
        temporal_factor: Frames in a temporal patch.
        box: Factor, smallest and largest volume.

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


def _sides(values: Whole) -> npt.NDArray[np.float64]:
    """Return float64; what is empty counts as 1, because one bad entry (refused elsewhere) must not stop a column."""
    return np.maximum(np.asarray(values, np.float64), 1.0)


def _fit(
    sides: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]],
    frames: npt.NDArray[np.float64],
    depth: npt.NDArray[np.float64],
    box: PixelBox,
    *,
    scalar: bool,
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
