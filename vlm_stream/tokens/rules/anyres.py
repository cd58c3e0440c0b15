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
        """Return the canvas on which most of the image survives; among equals, the one that wastes least."""
        h, w = np.maximum(heights, 1).astype(np.float64), np.maximum(widths, 1).astype(np.float64)
        area = h * w
        best_kept = np.zeros_like(area)
        best = np.zeros(area.shape, np.int64)
        # Small canvases first: a later one must keep more of the image, for with as much it would waste more.
        canvases = sorted(self.pinpoints, key=lambda canvas: canvas[0] * canvas[1])
        for number, (canvas_height, canvas_width) in enumerate(canvases):
            scale = np.minimum(canvas_width / w, canvas_height / h)
            kept = np.minimum(np.trunc(w * scale) * np.trunc(h * scale), area)
            best[kept > best_kept] = number
            np.maximum(best_kept, kept, out=best_kept)
        high, wide = np.asarray(canvases, np.int64).T
        return high[best], wide[best]

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        """Count images."""
        tokens, tiles = np.full_like(heights, self.tokens_per_tile + 1), np.ones_like(heights)
        is_alone = siblings == 1
        h, w = heights[is_alone], widths[is_alone]
        canvas_high, canvas_wide = self._find_canvas(h, w)
        rows, columns = canvas_high // self.tile_size, canvas_wide // self.tile_size
        features, line_ends = self._count_unpadded(h, w, rows, columns)
        tokens[is_alone], tiles[is_alone] = features + line_ends + self.tokens_per_tile, rows * columns + 1
        patches = tiles * self.tokens_per_tile  # the tower gives one token for each patch
        return MediaCounts(tokens - self.dropped_tokens, patches, patches.astype(np.float64) * self.tokens_per_tile)

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
