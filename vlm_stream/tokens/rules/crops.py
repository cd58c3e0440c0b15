"""An image is cut into rows of crops that the text marks one by one: SmolVLM and Step-3.7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.tokens.rules.base import MediaCounts
from vlm_stream.tokens.rules.fixed import count_pieces

if TYPE_CHECKING:
    from vlm_stream.tokens.rules.base import Floats, Ints

__all__ = ["RowCrops", "WindowCrops"]

_LARGEST_SIDE = 4096  # SmolVLM scales no image above it
_SNAP_UP = 0.2  # Step-3.7 rounds a side up when more than this share of a window is left over
_THIN_SIDE, _THIN_RATIO = 32, 4  # Step-3.7 pads images that are thinner to squares


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCrops:
    """Images of SmolVLM: crops in rows and columns, then an overview; small ones are the overview alone."""

    crop_size: int = 364
    """Pixels along a crop."""
    longest_side: int = 1456
    """Images are scaled to it."""
    tokens_per_crop: int = 169
    """Tokens of a crop, and of the overview."""
    patches_per_crop: int = 676
    """Patches of each."""
    splits: bool = True
    """Whether images are cut at all."""

    def count_rows_and_columns(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        """Return rows and columns; 0 and 0 where the image is not cut."""
        h, w = np.maximum(heights, 1).astype(np.float64), np.maximum(widths, 1).astype(np.float64)
        if not self.splits:
            return np.zeros_like(heights), np.zeros_like(heights)
        h, w = _scale_longest(h, w, self.longest_side)
        h, w = _scale_below(h, w, _LARGEST_SIDE)
        size = self.crop_size
        is_wide, shape = w >= h, w / h
        wide = np.where(is_wide, np.ceil(w / size) * size, 0)
        high = np.where(is_wide, 0, np.ceil(h / size) * size)
        high, wide = (
            np.where(is_wide, np.ceil(np.trunc(wide / shape) / size) * size, high),
            np.where(is_wide, wide, np.ceil(np.trunc(high * shape) / size) * size),
        )
        rows, columns = (np.ceil(side / size).astype(np.int64) for side in (high, wide))
        is_cut = (high > size) | (wide > size)
        return np.where(is_cut, rows, 0), np.where(is_cut, columns, 0)

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        rows, columns = self.count_rows_and_columns(heights, widths)
        return count_pieces(rows * columns + 1, self.tokens_per_crop, self.patches_per_crop)

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None


def _scale_longest(h: Floats, w: Floats, longest: int) -> tuple[Floats, Floats]:
    """Scale the longer side to `longest`; the other becomes even."""
    shape, is_wide = w / h, w >= h
    other = np.where(is_wide, np.trunc(longest / shape), np.trunc(longest * shape))
    other = np.maximum(other + other % 2, 1)
    return np.where(is_wide, other, longest), np.where(is_wide, longest, other)


def _scale_below(h: Floats, w: Floats, most: int) -> tuple[Floats, Floats]:
    shape, is_wide = w / h, w >= h
    is_over = np.maximum(h, w) > most
    new_h = np.where(is_wide, np.trunc(most / shape), most)
    new_w = np.where(is_wide, most, np.trunc(most * shape))
    return np.maximum(np.where(is_over, new_h, h), 1), np.maximum(np.where(is_over, new_w, w), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCrops:
    """Images of Step-3.7: an overview, and windows over it where it is large or long."""

    view_size: int = 728
    """Pixels along the overview."""
    window_size: int = 504
    """Pixels along a window, unless the image is thinner."""
    largest_side: int = 3024
    """Larger images are scaled down first."""
    tokens_per_view: int = 169
    """Tokens of the overview."""
    tokens_per_window: int = 81
    """Tokens of a window."""
    patches_per_view: int = 2704
    """Patches of the overview."""
    patches_per_window: int = 1296
    """Patches of a window."""

    def count_columns_and_rows(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        """Return columns and rows of windows; 0 and 0 where the overview is enough."""
        h, w = np.maximum(heights, 1), np.maximum(widths, 1)
        longer = np.maximum(h, w)
        is_thin = (np.minimum(h, w) < _THIN_SIDE) & (np.maximum(w / h, h / w) > _THIN_RATIO)
        h, w = np.where(is_thin, longer, h), np.where(is_thin, longer, w)
        scale = self.largest_side / longer
        is_large = longer > self.largest_side
        h, w = (np.where(is_large, (side * scale).astype(np.int64), side) for side in (h, w))
        shorter, longer = np.maximum(np.minimum(h, w), 1), np.maximum(h, w)
        ratio = longer / shorter
        window = np.where(ratio > 4, np.minimum(shorter, self.window_size), self.window_size)
        window = np.where(longer <= self.view_size, np.where(ratio > 1.5, shorter, 0), window)
        safe = np.maximum(window, 1)
        columns, rows = (np.maximum(1, side // safe + (side % safe > _SNAP_UP * safe)) for side in (w, h))
        columns, rows = (np.where(side < window, 1, number) for side, number in ((w, columns), (h, rows)))
        return np.where(window == 0, 0, columns), np.where(window == 0, 0, rows)

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        columns, rows = self.count_columns_and_rows(heights, widths)
        windows = count_pieces(columns * rows, self.tokens_per_window, self.patches_per_window)
        return MediaCounts(
            windows.tokens + self.tokens_per_view,
            windows.patches + self.patches_per_view,
            windows.squares + float(self.patches_per_view) ** 2,
        )

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None
