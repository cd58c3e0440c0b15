"""One picture of a plan: how long samples are, and how they lie in packs.

Enters: lengths of samples, packs as lists of (tokens, vision tokens). Leaves: a PNG file. Drawn with Pillow alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["draw_plan"]

_SIZE: Final = (1000, 620)
_MAX_PACKS: Final = 20
_TEXT: Final = (90, 120, 190)
_VISION: Final = (235, 150, 60)
_EMPTY: Final = (232, 232, 232)
_INK: Final = (40, 40, 40)


def draw_plan(path: Path, lengths: Sequence[int], packs: Sequence[Sequence[tuple[int, int]]], capacity: int) -> None:
    """Draw the histogram of lengths above the layout of packs.

    Args:
        path: Where the PNG goes.
        lengths: Tokens of each sample.
        packs: For each row its samples, as (tokens, how many of them stand for images and videos).
        capacity: Tokens of a row.
    """
    image = Image.new("RGB", _SIZE, "white")
    canvas = ImageDraw.Draw(image)
    _histogram(canvas, (60, 40, 960, 230), lengths)
    canvas.text((60, 18), f"tokens per sample ({len(lengths)} samples)", fill=_INK)
    canvas.text((60, 268), f"the first packs of {capacity} tokens: a bar is a sample", fill=_INK)
    _legend(canvas, 520, 268)
    shown = packs[:_MAX_PACKS]
    height = 300 // max(len(shown), 1)
    for number, pack in enumerate(shown):
        top = 300 + number * height
        _pack(canvas, (60, top, 960, top + height - 4), pack, capacity)
    image.save(path)


def _histogram(canvas: ImageDraw.ImageDraw, box: tuple[int, int, int, int], lengths: Sequence[int]) -> None:
    left, top, right, bottom = box
    counts, edges = np.histogram(lengths, bins=40)
    width = (right - left) / len(counts)
    for number, count in enumerate(counts.tolist()):
        height = count / max(int(counts.max()), 1) * (bottom - top)
        if count:
            canvas.rectangle(
                (left + number * width, bottom - height, left + (number + 1) * width - 1, bottom), fill=_TEXT
            )
    canvas.line((left, bottom, right, bottom), fill=_INK)
    canvas.text((left, bottom + 4), f"{edges[0]:.0f}", fill=_INK)
    canvas.text((right - 30, bottom + 4), f"{edges[-1]:.0f}", fill=_INK)


def _pack(
    canvas: ImageDraw.ImageDraw, box: tuple[float, float, float, float], pack: Sequence[tuple[int, int]], capacity: int
) -> None:
    left, top, right, bottom = box
    canvas.rectangle(box, fill=_EMPTY)
    scale = (right - left) / capacity
    for tokens, vision in pack:
        middle, end = left + vision * scale, left + tokens * scale
        canvas.rectangle((left, top, max(middle, left), bottom), fill=_VISION)
        canvas.rectangle((middle, top, max(end - 1, middle), bottom), fill=_TEXT)
        left = end


def _legend(canvas: ImageDraw.ImageDraw, left: int, top: int) -> None:
    for colour, name in ((_VISION, "image and video tokens"), (_TEXT, "text tokens"), (_EMPTY, "padding")):
        canvas.rectangle((left, top, left + 12, top + 12), fill=colour)
        canvas.text((left + 18, top), name, fill=_INK)
        left += 170
