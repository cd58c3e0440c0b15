"""How processors turn media sizes into tokens: one small frozen class per kind of rule, all vectorised, numpy only.

A rule holds the numbers of one processor's config and nothing else, so it travels as JSON. Heights, widths and numbers
of frames enter as int64 arrays; `MediaCounts` leave. This file: what every rule returns and looks like.

    grids.py     sides rounded to patches within pixel limits: Qwen2-VL to Qwen3-VL, Qwen Omni, GLM-4.6V
    budgets.py   scaled into a budget: Kimi-K2.5, Gemma-4, Nemotron-H-Omni
    pieces.py    cut into views, tiles, crops or rows: Gemma-3, InternVL, Phi-4, LLaVA-OneVision, SmolVLM, Llama 4, ...
    audio.py     samples to frames to tokens
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MAX_ASPECT_RATIO = 200  # the Qwen and GLM processors raise above it (200 itself passes)


@dataclass(frozen=True, slots=True, eq=False)
class MediaCounts:
    """What m media cost: each array is [m]."""

    tokens: Ints  # embeddings that stand for the medium in `input_ids`
    patches: Ints  # patches that enter the tower
    squares: Floats  # sum of squared patches over the pieces that the tower attends within: images, frames, tiles


class ImageRule(Protocol):
    """Images to tokens."""

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        """Count m images; `siblings` is the number of images in each one's sample, itself included."""

    def find_problem(self, height: int, width: int) -> str | None:
        """Return why the processor would refuse such an image, or None."""


class VideoRule(Protocol):
    """Clips of already sampled frames to tokens."""

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        """Count m clips."""

    def find_problem(self, height: int, width: int) -> str | None:
        """Return why the processor would refuse frames of that size, or None."""


class AudioRule(Protocol):
    """Sound to tokens."""

    @property
    def sampling_rate(self) -> int:
        """What sound is resampled to."""

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:
        """Count m clips; `longest` is the length of the longest clip in each one's sample, both at that rate."""


def name_aspect_problem(height: int, width: int, limit: float) -> str | None:
    """Return a sentence if the sides are further apart than `limit`."""
    longer, shorter = max(height, width), min(height, width)
    if shorter > 0 and longer / shorter > limit:
        return f"its sides {height}x{width} have a ratio above {limit:g}"
    return None


class TakesAnySize:
    """Rules of processors that refuse no size."""

    __slots__ = ()

    def find_problem(self, height: int, width: int) -> str | None:
        return None


def count_pieces(pieces: Ints, tokens_per_piece: int, patches_per_piece: int) -> MediaCounts:
    """Count media that are cut into equal pieces."""
    squares = pieces.astype(np.float64) * float(patches_per_piece) ** 2
    return MediaCounts(pieces * tokens_per_piece, pieces * patches_per_piece, squares)
