"""An image is cut into a grid of square tiles, nearest to its own shape: InternVL and Phi-4-multimodal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.tokens.rules.base import MediaCounts
from vlm_stream.tokens.rules.fixed import count_pieces

if TYPE_CHECKING:
    from vlm_stream.tokens.rules.base import Floats, Ints

__all__ = ["PaddedTiles", "TileGrid"]

_LEAST_SIDE = 10  # Phi-4-multimodal refuses images whose shorter side would be scaled below it
_GLOBAL_TOKENS = 256 + 16 + 1  # its overview, the line ends of the overview, and the separator


@cache
def _list_grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return all (columns, rows) with so many tiles, fewest tiles first, narrow before wide."""
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= least
    ]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


def find_nearest_grid(heights: Ints, widths: Ints, tile: int, least: int, most: int) -> tuple[Ints, Ints]:
    """Return columns and rows of the grid whose shape is nearest to the image's.

    Among grids of equal shape the one with more tiles wins, as long as the image fills half of it.
    """
    shape = widths / np.maximum(heights, 1)
    area = (widths * heights).astype(np.float64)
    best = np.full(shape.shape, np.inf)
    columns, rows = np.ones_like(heights), np.ones_like(heights)
    for wide, high in _list_grids(least, most):
        distance = np.abs(shape - wide / high)
        is_better = (distance < best) | ((distance == best) & (area > 0.5 * tile * tile * wide * high))
        columns[is_better], rows[is_better] = wide, high
        best = np.minimum(best, distance)
    return columns, rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGrid:
    """Images of InternVL: tiles, and an overview where there is more than one tile."""

    tile_size: int = 448
    """Pixels along a tile."""
    min_tiles: int = 1
    """Least tiles."""
    max_tiles: int = 12
    """Most tiles; 1: the image is not cut."""
    tokens_per_tile: int = 256
    """Tokens of a tile, and of the overview."""
    patches_per_tile: int = 1024
    """Patches of each."""

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        columns, rows = find_nearest_grid(heights, widths, self.tile_size, self.min_tiles, self.max_tiles)
        tiles = columns * rows
        return count_pieces(tiles + (tiles > 1), self.tokens_per_tile, self.patches_per_tile)

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedTiles:
    """Images of Phi-4-multimodal: tiles without their padding, line ends, and an overview."""

    tile_size: int = 448
    """Pixels along a tile."""
    patch_size: int = 14
    """Pixels along a patch."""
    max_tiles: int = 36
    """Most tiles."""

    def _fit(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints, Floats, Floats]:
        """Return the tile grid, and the pixels of it that the image fills."""
        columns, rows = (-(-side // self.tile_size) for side in (widths, heights))
        is_over = columns * rows > self.max_tiles
        if np.any(is_over):
            nearest = find_nearest_grid(heights[is_over], widths[is_over], self.tile_size, 1, self.max_tiles)
            columns[is_over], rows[is_over] = nearest
        full_width, full_height = self.tile_size * columns, self.tile_size * rows
        by_width, by_height = full_width / np.maximum(widths, 1), full_height / np.maximum(heights, 1)
        is_wide = by_width < by_height
        filled_height = np.where(is_wide, np.trunc(heights * by_width), full_height)
        filled_width = np.where(is_wide, full_width, np.trunc(widths * by_height))
        return columns, rows, filled_width, filled_height

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        columns, rows, filled_width, filled_height = self._fit(heights, widths)
        per_side = self.tile_size // self.patch_size
        across = self._count_kept(columns, filled_width, per_side)
        down = self._count_kept(rows, filled_height, per_side)
        tokens = _GLOBAL_TOKENS + across * down + down
        tiles = columns * rows + 1
        pieces = count_pieces(tiles, 0, per_side * per_side)
        return MediaCounts(tokens, pieces.patches, pieces.squares)

    def _count_kept(self, tiles: Ints, filled: Floats, per_side: int) -> Ints:
        """Return how many tokens along a side hold picture: every second patch of every tile, without the padding."""
        padding = (self.tile_size * tiles - filled).astype(np.int64) // self.patch_size
        kept = tiles * per_side - padding  # patches from the left or the top
        whole, rest = kept // per_side, kept % per_side
        per_tile = per_side // 2 + per_side % 2
        count: Ints = whole * per_tile + -(-rest // 2)
        return count

    def find_problem(self, height: int, width: int) -> str | None:
        """Refuse images whose short side would be scaled to almost nothing."""
        sides = np.asarray([height], np.int64), np.asarray([width], np.int64)
        filled_width, filled_height = self._fit(*sides)[2:]
        if min(filled_width[0], filled_height[0]) < _LEAST_SIDE:
            return f"its sides {height}x{width} are so far apart that the shorter one would be scaled to nothing"
        return None
