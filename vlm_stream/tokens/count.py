"""Counting: index columns and a geometry enter, lengths leave.

    tokens = text_tokens + tokens of all media - number of media

because `text_tokens` holds one token for every medium (see `text.py`). A medium that the geometry has no rule for (a
video for Gemma-3) is taken for 500 tokens; `check_media_sizes` rejects it where that is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from vlm_stream.keys import FAKE_IMAGE_SIZE
from vlm_stream.tokens.frames import count_frames
from vlm_stream.tokens.rules.audio import resample_length
from vlm_stream.tokens.rules.base import UnknownMedium

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.tokens.geometry import Geometry
    from vlm_stream.tokens.rules.base import Floats, Ints, MediaCounts
    from vlm_stream.tokens.sizes import MediaColumns

__all__ = ["TokenColumns", "count_tokens", "counted_as", "fake_image_tokens"]

_RULES_VERSION: Final = 1
"""To be raised when a rule counts otherwise than before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns:
    """What n samples cost a model, by the geometry of its processor."""

    tokens: npt.NDArray[np.int64]
    """[n] Length of `input_ids`: `text_tokens`, plus the embeddings of all media, minus the number of media."""
    vision_tokens: npt.NDArray[np.int64]
    """[n] How many of them are embeddings of images and videos."""
    vision_patches: npt.NDArray[np.int64]
    """[n] Patches that enter the vision tower."""
    vision_squares: npt.NDArray[np.float64]
    """[n] Sum over images and frames of patches squared: what full attention in the vision tower costs."""


def count_tokens(columns: MediaColumns, geometry: Geometry) -> TokenColumns:
    """Count what n samples cost."""
    num_rows = len(columns.text_tokens)
    tokens = columns.text_tokens.astype(np.int64)
    vision, patches = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    squares = np.zeros(num_rows, np.float64)
    for count, splits in (
        (_count_images, columns.image_splits),
        (_count_videos, columns.video_splits),
        (_count_audios, columns.audio_splits),
    ):
        if not splits[-1]:  # most data lacks at least one of them
            continue
        counts = count(columns, geometry)
        embeddings = _sum_rows(counts.tokens, splits)
        tokens = tokens + embeddings - _lengths(splits)
        if count is not _count_audios:
            vision = vision + embeddings
            patches = patches + _sum_rows(counts.patches, splits)
            squares = squares + _sum_floats(counts.squares, splits)
    return TokenColumns(tokens=tokens, vision_tokens=vision, vision_patches=patches, vision_squares=squares)


def counted_as(geometry_digest: str) -> str:
    """Return what identifies counts: where it is the same, `count_tokens` gives the same numbers."""
    return f"{_RULES_VERSION}:{geometry_digest}"


def fake_image_tokens(geometry: Geometry) -> int:
    """Return the embeddings of the fake image; the text around it is counted with the text.

    >>> from vlm_stream.tokens import Geometry
    >>> fake_image_tokens(Geometry.unknown())
    500
    """
    height, width = (np.asarray([side], np.int64) for side in FAKE_IMAGE_SIZE)
    rule = geometry.image or UnknownMedium()
    return int(rule.count_images(height, width, np.ones(1, np.int64)).tokens[0])


def _count_images(columns: MediaColumns, geometry: Geometry) -> MediaCounts:
    per_row = _lengths(columns.image_splits)
    siblings = np.repeat(per_row, per_row)  # [images]
    heights, widths = columns.image_sizes.T
    return (geometry.image or UnknownMedium()).count_images(heights, widths, siblings)


def _count_videos(columns: MediaColumns, geometry: Geometry) -> MediaCounts:
    total, heights, widths = columns.video_sizes.T
    frames = count_frames(
        total, columns.video_fps, geometry.frames, seconds=columns.video_seconds, picked=columns.video_picked
    )
    return (geometry.video or UnknownMedium()).count_videos(frames, heights, widths)


def _count_audios(columns: MediaColumns, geometry: Geometry) -> MediaCounts:
    rule = geometry.audio or UnknownMedium()
    samples, rates = columns.audio_sizes.T
    samples = resample_length(samples, rates, rule.sampling_rate)
    per_row = _lengths(columns.audio_splits)
    longest = np.zeros(len(per_row), np.int64)
    np.maximum.at(longest, np.repeat(np.arange(len(per_row)), per_row), samples)
    return rule.count_audios(samples, np.repeat(longest, per_row))


def _sum_rows(values: Ints, splits: Ints) -> Ints:
    """Sum ragged rows exactly; empty rows give 0 (`np.add.reduceat` would not)."""
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    rows: Ints = sums[splits[1:]] - sums[splits[:-1]]
    return rows


def _sum_floats(values: Floats, splits: Ints) -> Floats:
    """Sum ragged rows of floats, each row by itself so that large neighbours cost no digits."""
    per_row = _lengths(splits)
    rows = np.repeat(np.arange(len(per_row)), per_row)
    return np.bincount(rows, weights=values, minlength=len(per_row)).astype(np.float64, copy=False)


def _lengths(splits: Ints) -> Ints:
    """Return how many entries each row has."""
    lengths: Ints = splits[1:] - splits[:-1]
    return lengths
