"""A lone image is cut into tiles, images in company get one tile each: LLaVA-OneVision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.tokens.rules.base import MediaCounts

if TYPE_CHECKING:
    from vlm_stream.tokens.rules.base import Floats, Ints

__all__ = ["AnyresImage"]

_SHRINK_ABOVE = 1.1  # features are pooled when they exceed the limit by more than this ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyresImage:
    """Images of LLaVA-OneVision."""

    pinpoints: tuple[tuple[int, int], ...]
    """Heights and widths of the canvases that an image may be laid on."""
    tile_size: int = 384
    """Pixels along a tile."""
    tokens_per_tile: int = 729
    """Tokens of a tile, and of the overview."""
    max_tiles: int = 9
    """More features than so many tiles have are pooled."""
    dropped_tokens: int = 0
    """Tokens that the feature selection takes away from each image (1 for "default": the class token)."""

    def _find_canvas(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        """Return the canvas on which most of the image survives and least of the canvas is wasted."""
        h, w = np.maximum(heights, 1), np.maximum(widths, 1)
        area = h * w
        best_kept = np.zeros_like(area)
        least_waste = np.full(area.shape, np.inf)
        high, wide = np.zeros_like(area), np.zeros_like(area)
        for canvas_height, canvas_width in self.pinpoints:
            scale = np.minimum(canvas_width / w, canvas_height / h)
            kept = np.minimum((w * scale).astype(np.int64) * (h * scale).astype(np.int64), area)
            waste = canvas_width * canvas_height - kept
            is_better = (kept > best_kept) | ((kept == best_kept) & (waste < least_waste))
            best_kept, least_waste = np.where(is_better, kept, best_kept), np.where(is_better, waste, least_waste)
            high[is_better], wide[is_better] = canvas_height, canvas_width
        return high, wide

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        """Count images."""
        canvas_high, canvas_wide = self._find_canvas(heights, widths)
        rows, columns = canvas_high // self.tile_size, canvas_wide // self.tile_size
        features, line_ends = self._count_unpadded(heights, widths, rows, columns)
        is_alone = siblings == 1
        tokens = np.where(is_alone, features + line_ends + self.tokens_per_tile, self.tokens_per_tile + 1)
        tiles = np.where(is_alone, rows * columns + 1, 1)
        patches = tiles * self.tokens_per_tile  # the tower gives one token for each patch
        return MediaCounts(tokens - self.dropped_tokens, patches, patches * float(self.tokens_per_tile))

    def _count_unpadded(self, heights: Ints, widths: Ints, rows: Ints, columns: Ints) -> tuple[Ints, Ints]:
        side = int(self.tokens_per_tile**0.5)
        h, w = np.maximum(heights, 1).astype(np.float64), np.maximum(widths, 1).astype(np.float64)
        high, wide = (side * rows).astype(np.float64), (side * columns).astype(np.float64)
        is_wide = w / h > wide / high
        padding = np.where(
            is_wide,
            (high - _truncate_rounded(h * (wide / w))) // 2,
            (wide - _truncate_rounded(w * (high / h))) // 2,
        )
        high, wide = np.where(is_wide, high - 2 * padding, high), np.where(is_wide, wide, wide - 2 * padding)
        ratio = np.sqrt(high * wide / (self.max_tiles * side**2))
        is_pooled = ratio > _SHRINK_ABOVE
        high, wide = np.where(is_pooled, high // ratio, high), np.where(is_pooled, wide // ratio, wide)
        return (high * wide).astype(np.int64), high.astype(np.int64)

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None


def _truncate_rounded(values: Floats) -> Floats:
    """Truncate, after rounding away the noise of the seventh decimal."""
    return np.trunc(np.round(values, 7))
