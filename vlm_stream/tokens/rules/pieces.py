"""Images cut into pieces of one size: views, tiles, rows of crops; videos whose frames all cost the same.

Gemma-3, InternVL, Phi-4-multimodal, LLaVA-OneVision, SmolVLM, Pixtral, Llama 4.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from vlm_stream.tokens.rules import Floats, Ints, MediaCounts, TakesAnySize, count_pieces

_LEAST_SIDE = 10  # Phi-4-multimodal refuses images whose shorter side would be scaled below it
_GLOBAL_TOKENS = 256 + 16 + 1  # its overview, the line ends of the overview, and the separator
_SHRINK_ABOVE = 1.1  # LLaVA-OneVision pools features when they exceed the limit by more than this ratio
_LARGEST_SIDE = 4096  # SmolVLM scales no image above it


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedFrames(TakesAnySize):
    """Images, and frames of videos, that all cost the same: Gemma-3, PaliGemma, InternVL, LLaVA-OneVision, SmolVLM."""

    tokens_per_frame: int
    patches_per_frame: int
    tokens_per_video: int = 0  # tokens of the clip beside its frames

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        return count_pieces(np.ones_like(heights), self.tokens_per_frame, self.patches_per_frame)

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        counts = count_pieces(frames, self.tokens_per_frame, self.patches_per_frame)
        return MediaCounts(counts.tokens + self.tokens_per_video, counts.patches, counts.squares)


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


def _find_nearest_grid(heights: Ints, widths: Ints, tile: int, least: int, most: int) -> tuple[Ints, Ints]:
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
class TileGrid(TakesAnySize):
    """Images of InternVL: tiles, and an overview where there is more than one tile."""

    tile_size: int = 448
    min_tiles: int = 1
    max_tiles: int = 12  # most tiles; 1: the image is not cut
    tokens_per_tile: int = 256  # tokens of a tile, and of the overview
    patches_per_tile: int = 1024  # patches of each

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        columns, rows = _find_nearest_grid(heights, widths, self.tile_size, self.min_tiles, self.max_tiles)
        tiles = columns * rows
        return count_pieces(tiles + (tiles > 1), self.tokens_per_tile, self.patches_per_tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedTiles:
    """Images of Phi-4-multimodal: tiles without their padding, line ends, and an overview."""

    tile_size: int = 448
    patch_size: int = 14
    max_tiles: int = 36

    def _fit(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints, Floats, Floats]:
        """Return the tile grid, and the pixels of it that the image fills."""
        columns, rows = (-(-side // self.tile_size) for side in (widths, heights))
        is_over = columns * rows > self.max_tiles
        if np.any(is_over):
            nearest = _find_nearest_grid(heights[is_over], widths[is_over], self.tile_size, 1, self.max_tiles)
            columns[is_over], rows[is_over] = nearest
        full_width, full_height = self.tile_size * columns, self.tile_size * rows
        by_width, by_height = full_width / np.maximum(widths, 1), full_height / np.maximum(heights, 1)
        is_wide = by_width < by_height
        filled_height = np.where(is_wide, np.trunc(heights * by_width), full_height)
        filled_width = np.where(is_wide, full_width, np.trunc(widths * by_height))
        return columns, rows, filled_width, filled_height

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyresImage(TakesAnySize):
    """Images of LLaVA-OneVision: one alone is cut into tiles, several get one tile each; of LLaVA-NeXT: all are cut."""

    pinpoints: tuple[tuple[int, int], ...]
    """Heights and widths of the canvases that an image may be laid on."""
    tile_size: int = 384
    tokens_per_tile: int = 729
    """Tokens of a tile, and of the overview."""
    max_tiles: int = 9
    """More features than so many tiles have are pooled; 0: none are."""
    dropped_tokens: int = 0
    """Tokens that the feature selection takes away from each image (1 for "default": the class token)."""
    cuts_all: bool = False
    """Whether images beside others are cut too."""

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
        tokens, tiles = np.full_like(heights, self.tokens_per_tile + 1), np.ones_like(heights)
        is_alone = (siblings == 1) | self.cuts_all
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
            is_wide, (high - _truncate_rounded(h * (wide / w))) // 2, (wide - _truncate_rounded(w * (high / h))) // 2
        )
        high, wide = np.where(is_wide, high - 2 * padding, high), np.where(is_wide, wide, wide - 2 * padding)
        if self.max_tiles:
            ratio = np.sqrt(high * wide / (self.max_tiles * side**2))
            is_pooled = ratio > _SHRINK_ABOVE
            high, wide = np.where(is_pooled, high // ratio, high), np.where(is_pooled, wide // ratio, wide)
        return (high * wide).astype(np.int64), high.astype(np.int64)


def _truncate_rounded(values: Floats) -> Floats:
    """Truncate, after rounding away the noise of the seventh decimal."""
    return np.trunc(np.round(values, 7))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCrops(TakesAnySize):
    """Images of SmolVLM and Idefics3: crops in rows and columns, then an overview; small ones are only that."""

    crop_size: int = 364
    longest_side: int = 1456  # images are scaled to it
    tokens_per_crop: int = 169  # tokens of a crop, and of the overview
    patches_per_crop: int = 676  # patches of each
    splits: bool = True  # whether images are cut at all

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

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        rows, columns = self.count_rows_and_columns(heights, widths)
        return count_pieces(rows * columns + 1, self.tokens_per_crop, self.patches_per_crop)


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
class RowGrid(TakesAnySize):
    """Images of Pixtral and Mistral-3: rows of tokens, each with a mark at its end; never enlarged."""

    patch_size: int = 16
    merge_size: int = 1  # patches along the square that becomes one token
    longest_side: int = 1024

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        h, w = np.maximum(heights, 1), np.maximum(widths, 1)
        scale = np.maximum(h / self.longest_side, w / self.longest_side)
        token = self.patch_size * self.merge_size
        sides = [np.where(scale > 1, np.floor(side / scale), side).astype(np.int64) for side in (h, w)]
        rows, columns = ((side - 1) // token + 1 for side in sides)
        patches = rows * columns * self.merge_size**2
        return MediaCounts(rows * (columns + 1), patches, patches.astype(np.float64) ** 2)


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

        def scale(canvas: tuple[int, int]) -> npt.NDArray[np.float32]:
            high, wide = (np.float32(number * self.tile_size) for number in canvas)
            found: npt.NDArray[np.float32] = np.minimum(high / h, wide / w)
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
