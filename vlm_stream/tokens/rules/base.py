"""What every rule returns and looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

__all__ = ["AudioRule", "ImageRule", "MediaCounts", "VideoRule", "name_aspect_problem"]


@dataclass(frozen=True, slots=True, eq=False)
class MediaCounts:
    """What m media cost: each array is [m]."""

    tokens: Ints
    """Embeddings that stand for the medium in `input_ids`."""
    patches: Ints
    """Patches that enter the tower."""
    squares: Floats
    """Sum of squared patches over the pieces that the tower attends within: images, frames, tiles."""


class ImageRule(Protocol):
    """Images to tokens."""

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        """Count m images; `siblings` is the number of images in each one's sample, itself included."""
        ...

    def find_problem(self, height: int, width: int) -> str | None:
        """Return why the processor would refuse such an image, or None."""
        ...


class VideoRule(Protocol):
    """Clips of already sampled frames to tokens."""

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        """Count m clips."""
        ...

    def find_problem(self, height: int, width: int) -> str | None:
        """Return why the processor would refuse frames of that size, or None."""
        ...


class AudioRule(Protocol):
    """Sound to tokens."""

    @property
    def sampling_rate(self) -> int:
        """What sound is resampled to."""
        ...

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:
        """Count m clips; `longest` is the length of the longest clip in each one's sample, both at that rate."""
        ...


def name_aspect_problem(height: int, width: int, limit: float) -> str | None:
    """Return a sentence if the sides are further apart than `limit`."""
    longer, shorter = max(height, width), min(height, width)
    if shorter > 0 and longer / shorter > limit:
        return f"its sides {height}x{width} have a ratio above {limit:g}"
    return None
