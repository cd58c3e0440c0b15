"""The one rule by which frames are sampled: a clip's length and rate enter, frame numbers or their count leave.

`count_frames(...) == len(frame_indices(...))` always: planning counts without opening a clip, decoding picks. A
clip never gives more frames than it has; a temporal patch that lacks some is filled by repeating the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import BadSampleError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["ASSUMED_FPS", "FrameRule", "count_frames", "frame_indices", "make_video_metadata"]

ASSUMED_FPS = 24.0
"""What the processors write timestamps with when a clip does not tell its rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRule:
    """How many frames of a clip a model sees."""

    fps: float | None = 2.0
    """Frames per second of the clip's own time; None takes every frame."""
    min_frames: int = 4
    """At least so many, if the clip has them."""
    max_frames: int | None = 768
    """At most so many (rounded up to a temporal patch); None is no limit."""
    temporal_patch_size: int = 2
    """The number of frames is a multiple of it."""

    def __post_init__(self) -> None:
        """Refuse rules that pick nothing."""
        if self.fps is not None and not self.fps > 0:
            raise ConfigError(f"A rate of {self.fps} frames per second picks nothing: give a positive fps, or None.")
        if self.min_frames < 1 or self.temporal_patch_size < 1:
            raise ConfigError(
                f"min_frames={self.min_frames} and temporal_patch_size={self.temporal_patch_size} must be at least 1."
            )
        if self.max_frames is not None and self.max_frames < 1:
            raise ConfigError(f"max_frames={self.max_frames} leaves no frame of any clip: give at least 1, or None.")


def count_frames(
    total: npt.ArrayLike,
    fps: npt.ArrayLike,
    rule: FrameRule,
    *,
    seconds: npt.ArrayLike = 0.0,
    picked: npt.ArrayLike = 0,
) -> Any:
    """Return how many frames are read, repeated ones included; numbers give an int, arrays an int64 array.

    Args:
        total: Frames in the clip; 0 where the file does not say.
        fps: Frames per second; 0 where the file does not say.
        rule: The rule.
        seconds: Duration, used where `total` is 0.
        picked: How many frames the sample names itself; 0 lets the rule decide.

    >>> count_frames(100, 25.0, FrameRule(fps=2.0))
    8
    """
    total_, fps_, seconds_, picked_ = np.broadcast_arrays(total, fps, seconds, picked)
    frames = total_.astype(np.float64)
    rate = fps_.astype(np.float64)
    guess = np.where(rate > 0, np.floor(seconds_ * rate), 0.0)
    frames = np.where(frames > 0, frames, guess)
    wanted = _wanted(frames, rate, seconds_.astype(np.float64), rule)
    patch = rule.temporal_patch_size
    count = np.where(picked_ > 0, picked_, wanted)
    count = np.ceil(count / patch) * patch
    return int(count) if count.ndim == 0 else count.astype(np.int64)


def _wanted(
    total: npt.NDArray[np.float64], fps: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], rule: FrameRule
) -> npt.NDArray[np.float64]:
    """Frames that the rule asks for, before a short clip is filled up."""
    wanted = total.astype(np.float64)
    if rule.fps is not None:
        with np.errstate(all="ignore"):  # unknown and absurd rates are settled by the limits below
            by_rate = total / fps * rule.fps
        wanted = np.where(fps > 0, by_rate, total)
        # A clip of which neither frames nor rate are known: its duration is all there is to go by.
        wanted = np.where((total <= 0) & (seconds > 0), seconds * rule.fps, wanted)
    wanted = np.maximum(wanted, rule.min_frames)
    if rule.max_frames is not None:
        wanted = np.minimum(wanted, rule.max_frames)
    patch = rule.temporal_patch_size
    whole = np.ceil(np.floor(np.where(total > 0, np.minimum(wanted, total), wanted)) / patch) * patch
    return np.where(total > 0, np.minimum(whole, total), whole)


def frame_indices(
    total: int, fps: float, rule: FrameRule, picked: Sequence[int] | None = None
) -> npt.NDArray[np.int64]:
    """Return the numbers of the frames to read, in order; the last may repeat to fill a temporal patch.

    Args:
        total: Frames in the clip.
        fps: Frames per second; 0 if unknown.
        rule: The rule.
        picked: Frame numbers that the sample names itself; those outside of the clip are moved to its ends.

    Raises:
        BadSampleError: The clip has no frame.

    >>> frame_indices(3, 25.0, FrameRule()).tolist()
    [0, 1, 2, 2]
    """
    if total < 1:
        raise BadSampleError("decode", "no_frames", "The clip has no frame, so nothing can be sampled from it.")
    if picked is not None and len(picked):
        chosen = np.clip(np.asarray(picked, np.int64), 0, total - 1)
    else:
        number = int(_wanted(np.array([float(total)]), np.array([float(fps)]), np.zeros(1), rule)[0])
        chosen = np.rint(np.linspace(0, total - 1, number)).astype(np.int64)
    missing = -len(chosen) % rule.temporal_patch_size
    return np.concatenate([chosen, np.repeat(chosen[-1:], missing)])


def make_video_metadata(
    total: int, fps: float, seconds: float, indices: Sequence[int] | npt.NDArray[np.int64]
) -> dict[str, Any]:
    """Return the metadata that processors write timestamps from; counting and encoding must use the same.

    >>> make_video_metadata(50, 25.0, 2.0, [0, 49])["duration"]
    2.0
    """
    rate = fps if fps > 0 and math.isfinite(fps) else ASSUMED_FPS
    return {
        "total_num_frames": int(total),
        "fps": float(rate),
        "duration": float(seconds) if seconds > 0 else total / rate,
        "frames_indices": [int(index) for index in indices],
    }
