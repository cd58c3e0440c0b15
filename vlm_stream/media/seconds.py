"""Seconds of a file become its frames: which of them a part shows, and the facts of that part.

Enters: the times of all frames, counted from the first, and a start and an end. Leaves: the first frame of the part and
its facts; times are those that the file states, so rates may vary. What is not in the file raises `BadSampleError`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.conversation import Seconds

_ROUNDING: Final = 1e-3
"""A frame that is earlier by so many seconds counts: containers and annotations round times."""
_SLACK: Final = 0.1
"""An end that is later than the end of the file by so many seconds is the end of the file."""


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """The facts of one video."""

    frames: int
    """Frames in the file."""
    height: int
    """As shown, after the turn of the display matrix."""
    width: int
    fps: float
    """Average frames per second; 0 where the file does not say."""
    seconds: float


def find_frames(times: npt.NDArray[np.float64], fps: float, seconds: Seconds) -> tuple[int, int]:
    """Return the first frame that is shown at the start or later, and how many there are before the end."""
    gaps = np.diff(times)
    # The last frame is shown no longer than the longest of the others.
    length = float(times[-1]) + max(float(gaps.max(initial=0.0)), 1 / fps if fps > 0 else 0.0)
    _check_inside(seconds, length)
    end = length if seconds.end is None else seconds.end
    first, stop = np.searchsorted(times, [seconds.start - _ROUNDING, end - _ROUNDING]).tolist()
    if stop <= first:
        detail = f"no frame begins from {seconds.start:g} to {end:g} s; give more time, or leave the sample out."
        raise BadSampleError("convert", "bad_span", detail)
    return first, stop - first


def find_samples(samples: int, rate: int, seconds: Seconds) -> tuple[int, int]:
    """Return the first sample of a part of a sound, and the first behind it."""
    _check_inside(seconds, samples / rate)
    end = samples if seconds.end is None else min(round(seconds.end * rate), samples)
    start = round(seconds.start * rate)
    if end <= start:
        detail = f"no sample of {rate} Hz lies from {seconds.start:g} s to {end / rate:g} s; give more time."
        raise BadSampleError("convert", "bad_span", detail)
    return start, end


def _check_inside(seconds: Seconds, length: float) -> None:
    if seconds.start >= length - _ROUNDING or (seconds.end is not None and seconds.end > length + _SLACK):
        end = "the end" if seconds.end is None else f"{seconds.end:g} s"
        detail = f"{seconds.start:g} s to {end} is asked of a file of {length:.3f} s; mend start and end."
        raise BadSampleError("convert", "bad_span", detail)


def part_of(info: VideoInfo, frames: int) -> VideoInfo:
    """Return the facts of some frames of a clip, as if they were a clip of their own."""
    seconds = frames / info.fps if info.fps > 0 else info.seconds * frames / info.frames
    return replace(info, frames=frames, seconds=seconds)


def cut_info(info: VideoInfo, times: npt.NDArray[np.float64], seconds: Seconds) -> tuple[int, VideoInfo]:
    """Return the first frame of a part of a clip, and the facts of that part."""
    if len(times) != info.frames:
        detail = (
            f"the decoder counts {info.frames} frames and the file has times for {len(times)}, so it is not known "
            f"which of them start and end mean; decode it with video_backend='av'."
        )
        raise BadSampleError("convert", "bad_span", detail)
    first, frames = find_frames(times, info.fps, seconds)
    return first, part_of(info, frames)
