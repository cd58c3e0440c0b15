"""Images laid on the canvas of tiles that needs the least scaling: Llama 4."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from vlm_stream.tokens.rules import Ints, MediaCounts, TakesAnySize, count_pieces

_Scales = npt.NDArray[np.float32]


@cache
def _list_canvases(most: int) -> tuple[tuple[int, int], ...]:
    """Return all (rows, columns) with so many tiles at most, those of one shape beside each other."""
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for tiles in range(most, 0, -1):
        for rows in range(1, tiles + 1):
            if tiles % rows == 0:
                columns = tiles // rows
                by_shape.setdefault(rows / columns, []).append((rows, columns))
    return tuple(canvas for same in by_shape.values() for canvas in same)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasTiles(TakesAnySize):
    """Images of Llama 4: tiles of a canvas, and an overview where there is more than one."""

    tile_size: int = 336
    max_tiles: int = 16
    tokens_per_tile: int = 144  # tokens of a tile, and of the overview
    patches_per_tile: int = 576  # patches of each
    takes_largest: bool = False  # the canvas that enlarges an image most, not the one that does so least

    def count_rows_and_columns(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        """Return rows and columns of the smallest canvas of the best scale, in single precision as the processor."""
        h, w = (np.maximum(side, 1).astype(np.float32) for side in (heights, widths))

        def scale(canvas: tuple[int, int]) -> _Scales:
            high, wide = (np.float32(number * self.tile_size) for number in canvas)
            found: _Scales = np.minimum(high / h, wide / w)
            return found

        canvases = _list_canvases(self.max_tiles)
        nearest = np.maximum if self.takes_largest else np.minimum
        enlarged = np.full(h.shape, -np.inf if self.takes_largest else np.inf, np.float32)
        shrunk = np.zeros(h.shape, np.float32)
        for canvas in canvases:
            found = scale(canvas)
            enlarged = np.where(found >= 1, nearest(enlarged, found), enlarged)
            shrunk = np.where(found < 1, np.maximum(shrunk, found), shrunk)
        best = np.where(np.isfinite(enlarged), enlarged, shrunk)
        rows, columns = np.ones_like(heights), np.ones_like(widths)
        least = np.full(h.shape, np.iinfo(np.int64).max)
        for high, wide in canvases:
            is_better = (scale((high, wide)) == best) & (high * wide < least)
            rows[is_better], columns[is_better], least[is_better] = high, wide, high * wide
        return rows, columns

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        rows, columns = self.count_rows_and_columns(heights, widths)
        tiles = rows * columns
        return count_pieces(tiles + (tiles > 1), self.tokens_per_tile, self.patches_per_tile)
