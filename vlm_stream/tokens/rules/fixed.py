"""The same number of tokens for every image, crop or frame: Gemma-3, and videos of InternVL, SmolVLM and LLaVA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.tokens.resize import MAX_ASPECT_RATIO
from vlm_stream.tokens.rules.base import MediaCounts, name_aspect_problem

if TYPE_CHECKING:
    from vlm_stream.tokens.rules.base import Ints

__all__ = ["FixedFrames", "FixedImage", "UnknownMedium"]

GUESSED_TOKENS = 500
"""What a medium of unknown cost is taken for."""


def count_pieces(pieces: Ints, tokens_per_piece: int, patches_per_piece: int) -> MediaCounts:
    """Count media that are cut into equal pieces."""
    squares = pieces.astype(np.float64) * float(patches_per_piece) ** 2
    return MediaCounts(pieces * tokens_per_piece, pieces * patches_per_piece, squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedImage:
    """Images of Gemma-3, with its pan-and-scan crops if they are on."""

    tokens_per_view: int = 256
    """Tokens of the image, and of each crop."""
    patches_per_view: int = 4096
    """Patches of each."""
    max_crops: int = 0
    """Most crops; 0: pan and scan is off."""
    min_crop_size: int = 256
    """Least pixels along a crop."""
    min_ratio: float = 1.2
    """Images nearer to a square are not cropped."""

    def count_crops(self, heights: Ints, widths: Ints) -> Ints:
        """Return the number of crops beside the image itself."""
        if self.max_crops == 0:
            return np.zeros_like(heights)
        longer, shorter = np.maximum(heights, widths), np.maximum(np.minimum(heights, widths), 1)
        ratio = longer / shorter
        crops = np.minimum(longer // self.min_crop_size, np.floor(ratio + 0.5).astype(np.int64))
        crops = np.minimum(self.max_crops, np.maximum(2, crops))
        is_cropped = (ratio >= self.min_ratio) & (np.minimum(-(-longer // crops), shorter) >= self.min_crop_size)
        return np.where(is_cropped, crops, 0)

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        return count_pieces(1 + self.count_crops(heights, widths), self.tokens_per_view, self.patches_per_view)

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedFrames:
    """Videos whose frames all cost the same."""

    tokens_per_frame: int
    """Tokens of a frame."""
    patches_per_frame: int
    """Patches of a frame."""
    tokens_per_video: int = 0
    """Tokens of the clip beside its frames."""

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:  # noqa: ARG002
        """Count clips."""
        counts = count_pieces(frames, self.tokens_per_frame, self.patches_per_frame)
        return MediaCounts(counts.tokens + self.tokens_per_video, counts.patches, counts.squares)

    def find_problem(self, height: int, width: int) -> str | None:  # noqa: ARG002
        """Refuse nothing."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownMedium:
    """A guess for media whose processor is not known; also what a medium costs that a processor cannot read."""

    tokens: int = GUESSED_TOKENS
    """The guess."""

    def _guess(self, like: Ints) -> MediaCounts:
        return count_pieces(np.ones_like(like), self.tokens, self.tokens)

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:  # noqa: ARG002
        """Count images."""
        return self._guess(heights)

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:  # noqa: ARG002
        """Count clips."""
        return self._guess(frames)

    @property
    def sampling_rate(self) -> int:
        """Any rate will do for a guess."""
        return 16000

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:  # noqa: ARG002
        """Count sounds."""
        return self._guess(samples)

    def find_problem(self, height: int, width: int) -> str | None:
        """Refuse the shapes that the most common families refuse."""
        return name_aspect_problem(height, width, MAX_ASPECT_RATIO)
