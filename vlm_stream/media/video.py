"""Videos: bytes to the frames that a rule picks, and the facts that the rule and the processor need.

Enters: the bytes of one file (or its path, or a list of still frames) and `pick`, which sees the facts and names frame
indices. Leaves: frames [n, height, width, 3] uint8 and the facts: every backend gives the same frames for the same
indices, turned as the file's display matrix says. Only the groups of pictures that hold a picked frame are decoded.
The sampling rule itself is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.media.image import DEFAULT_IMAGE_CONFIG, ImageConfig, decode_image, probe_image
from vlm_stream.media.video_backends import choose_backend, open_video

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

__all__ = ["DecodedVideo", "VideoBackend", "VideoInfo", "decode_frame_list", "decode_video", "probe_video"]

VideoData: TypeAlias = "bytes | bytearray | memoryview | str | Path"
VideoBackend: TypeAlias = Literal["auto", "decord", "av", "torchcodec"]


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


@dataclass(frozen=True, slots=True, eq=False)
class DecodedVideo:
    """The picked frames of one video."""

    frames: npt.NDArray[np.uint8]
    """[n, height, width, 3]"""
    info: VideoInfo
    indices: tuple[int, ...]
    """Which frame of the file each of the n is; the last may repeat."""


def probe_video(data: VideoData, backend: VideoBackend = "auto") -> VideoInfo:
    """Return the facts, or raise `BadSampleError`; one picture is decoded: only pictures say how they are turned."""
    with open_video(data, choose_backend(backend), stage="convert") as video:
        return VideoInfo(*video.facts())


def decode_video(
    data: VideoData, pick: Callable[[VideoInfo], Sequence[int]], backend: VideoBackend = "auto"
) -> DecodedVideo:
    """Decode the frames whose indices `pick` names for this video, in that order."""
    with open_video(data, choose_backend(backend), stage="decode") as video:
        info = VideoInfo(*video.facts())
        indices = tuple(int(index) for index in pick(info))
        _check_indices(indices, info)
        return DecodedVideo(frames=video.frames(indices), info=info, indices=indices)


def decode_frame_list(
    frames: Sequence[bytes | bytearray | memoryview | str | Path],
    pick: Callable[[VideoInfo], Sequence[int]],
    fps: float | None,
    config: ImageConfig = DEFAULT_IMAGE_CONFIG,
) -> DecodedVideo:
    """Treat a list of still images as a video of `fps` frames per second."""
    import numpy as np

    if not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        raise BadSampleError(
            "decode",
            "missing_fps",
            "fps is required for a video given as a list of frames: put 'fps' on the item or set the processor's "
            "video_processor.fps.",
        )
    if not frames:
        raise BadSampleError("decode", "bad_video", "The video is an empty list of frames.")
    height, width = probe_image(frames[0])
    info = VideoInfo(len(frames), height, width, float(fps), len(frames) / float(fps))
    indices = tuple(int(index) for index in pick(info))
    _check_indices(indices, info)
    decoded = {index: np.asarray(decode_image(frames[index], config)) for index in sorted(set(indices))}
    sizes = {frame.shape for frame in decoded.values()}
    if len(sizes) > 1:
        raise BadSampleError("decode", "bad_video", f"The frames of a video differ in size: {sorted(sizes)}.")
    return DecodedVideo(frames=np.stack([decoded[index] for index in indices]), info=info, indices=indices)


def _check_indices(indices: tuple[int, ...], info: VideoInfo) -> None:
    if not indices:
        raise ConfigError(f"The frame rule picked no frame of a video with {info.frames}; it must pick at least one.")
    if min(indices) < 0 or max(indices) >= info.frames:
        raise BadSampleError(
            "decode", "frame_index", f"Frames {min(indices)}..{max(indices)} were asked of a video with {info.frames}."
        )
