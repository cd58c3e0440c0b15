"""What an index says about samples, as numpy columns, and what counting makes of it.

Lists of media are ragged: row `i` owns the entries `splits[i]:splits[i + 1]`. For three samples with 2, 0 and 1 images
`image_splits` is `[0, 2, 2, 3]` and `image_sizes` has three rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["MediaColumns", "TokenColumns", "join_columns"]

_VALUES: Final = ("text_tokens", "label_tokens", "image_sizes", "video_sizes", "video_picked", "audio_sizes")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaColumns:
    """Text counts and media sizes of n samples, straight from an index."""

    text_tokens: npt.NDArray[np.int64]
    """[n] Everything but embeddings, plus one for every medium: the rendered chat, marks around media, timestamps."""
    label_tokens: npt.NDArray[np.int64]
    """[n] How many of them are labels: the answers that are to be learned, with their stop tokens. -1: unknown."""
    image_splits: npt.NDArray[np.int64]
    """[n + 1]"""
    image_sizes: npt.NDArray[np.int64]
    """[images, 2] Height and width, as stored."""
    video_splits: npt.NDArray[np.int64]
    """[n + 1]"""
    video_sizes: npt.NDArray[np.int64]
    """[videos, 3] Frames, height and width, as stored."""
    video_fps: npt.NDArray[np.float64]
    """[videos] Frames per second; 0 where the file does not say."""
    video_seconds: npt.NDArray[np.float64]
    """[videos] Duration."""
    video_picked: npt.NDArray[np.int64]
    """[videos] Number of frames that the sample names itself (`frame_indices`, a frame list); 0: the rule samples."""
    audio_splits: npt.NDArray[np.int64]
    """[n + 1]"""
    audio_sizes: npt.NDArray[np.int64]
    """[audios, 2] Samples and sampling rate."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.text_tokens)


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


def join_columns(parts: Sequence[MediaColumns]) -> MediaColumns:
    """Join columns end to end: counting many small indexes at once costs little more than counting one."""

    def values(name: str) -> npt.NDArray[np.int64]:
        return np.concatenate([getattr(part, name) for part in parts])

    def splits(name: str) -> npt.NDArray[np.int64]:
        counts = np.concatenate([np.diff(getattr(part, name)) for part in parts])
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])

    return MediaColumns(
        **{name: splits(name) for name in ("image_splits", "video_splits", "audio_splits")},
        **{name: values(name) for name in _VALUES},
        video_fps=np.concatenate([part.video_fps for part in parts]),
        video_seconds=np.concatenate([part.video_seconds for part in parts]),
    )
