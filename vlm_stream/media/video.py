"""Videos: bytes to the frames that a rule picks, and the facts that the rule and the processor need.

Enters: the bytes of one file (or its path, or a list of still frames) and `pick`, which sees the facts and names frame
indices. Leaves: frames [n, height, width, 3] uint8 and the facts. PyAV decodes, or a library that is asked for by its
name (`backends`). The sampling rule itself is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from vlm_stream.clips import Sheet
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.media.backends import AvVideo, OpenVideo, VideoBackend, VideoData, choose_backend, open_video
from vlm_stream.media.image import DEFAULT_IMAGE_CONFIG, ImageConfig, decode_image, probe_image
from vlm_stream.media.limits import DEFAULT_LIMITS, MediaLimits
from vlm_stream.media.seconds import VideoInfo, cut_info, part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from vlm_stream.clips import PickedClip
    from vlm_stream.conversation import Seconds

    Frames = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class DecodedVideo:
    """The picked frames of one video."""

    frames: Frames
    """[n, height, width, 3]"""
    info: VideoInfo
    indices: tuple[int, ...]
    """Which frame of the file, or of the part of it that is shown, each of the n is; the last may repeat."""


def probe_video(
    data: VideoData,
    backend: VideoBackend = "auto",
    limits: MediaLimits = DEFAULT_LIMITS,
    *,
    seconds: Seconds | None = None,
) -> VideoInfo:
    """Return the facts, or raise `BadSampleError`; one picture is decoded: only pictures say how they are turned."""
    with open_video(data, choose_backend(backend), "convert") as video:
        limits.check_video("convert", video.facts())
        return _shown(video, data, seconds)[1]


def decode_video(
    data: VideoData,
    pick: Callable[[VideoInfo], Sequence[int]],
    backend: VideoBackend = "auto",
    limits: MediaLimits = DEFAULT_LIMITS,
    *,
    seconds: Seconds | None = None,
) -> DecodedVideo:
    """Decode the frames whose indices `pick` names for this video, or for a part of it, in that order."""
    with open_video(data, choose_backend(backend), "decode") as video:
        limits.check_video("decode", video.facts())
        first, info = _shown(video, data, seconds)
        indices = _picked(info, pick, limits)
        return DecodedVideo(frames=video.frames([first + index for index in indices]), info=info, indices=indices)


def _shown(video: OpenVideo, data: VideoData, seconds: Seconds | None) -> tuple[int, VideoInfo]:
    """Return the first frame that is shown, and the facts of what is shown."""
    if seconds is None:
        return 0, video.facts()
    if isinstance(video, AvVideo):
        return cut_info(video.facts(), video.times(), seconds)
    with open_video(data, "av", "decode") as timed:
        return cut_info(video.facts(), cast("AvVideo", timed).times(), seconds)


def decode_picked(
    clip: PickedClip,
    pick: Callable[[VideoInfo], Sequence[int]],
    limits: MediaLimits = DEFAULT_LIMITS,
    *,
    seconds: Seconds | None = None,
) -> DecodedVideo:
    """Decode the frames whose indices `pick` names, from the ranges that were fetched for them."""
    info, first = VideoInfo(*clip.facts), 0
    limits.check_video("decode", info)
    if seconds is not None:
        first, frames = clip.spans[seconds]
        info = part_of(info, frames)
    indices = _picked(info, pick, limits)
    wanted = [first + index for index in indices]
    sheet = Sheet(wanted, info.height, info.width)
    clip.decode(wanted, sheet.put)
    if sheet.left:
        raise BadSampleError("decode", "frame_index", f"Frame {min(sheet.left)} was not among those that were fetched.")
    return DecodedVideo(frames=sheet.frames, info=info, indices=indices)


def decodes_by_frames(backend: VideoBackend) -> bool:
    """Return whether clips with tables are decoded by their packets: a library named by the user decodes all itself."""
    return backend in ("auto", "av")


def decode_frame_list(
    frames: Sequence[bytes | bytearray | memoryview | str | Path],
    pick: Callable[[VideoInfo], Sequence[int]],
    fps: float | None,
    config: ImageConfig = DEFAULT_IMAGE_CONFIG,
    limits: MediaLimits = DEFAULT_LIMITS,
) -> DecodedVideo:
    """Treat a list of still images as a video of `fps` frames per second."""
    if not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        raise BadSampleError(
            "decode",
            "missing_fps",
            "fps is required for a video given as a list of frames: put 'fps' on the item or set the processor's "
            "video_processor.fps.",
        )
    if not frames:
        raise BadSampleError("decode", "bad_video", "The video is an empty list of frames.")
    height, width = probe_image(frames[0], limits)
    info = VideoInfo(len(frames), height, width, float(fps), len(frames) / float(fps))
    limits.check_video("decode", info)
    indices = _picked(info, pick, limits)
    sheet: Sheet | None = None
    for index in sorted(set(indices)):
        picture = np.asarray(decode_image(frames[index], config, limits))
        sheet = sheet or Sheet(indices, *picture.shape[:2])
        if picture.shape != (shape := sheet.frames.shape[1:]):
            sizes = sorted({picture.shape, shape})
            raise BadSampleError("decode", "bad_video", f"The frames of a video differ in size: {sizes}.")
        sheet.put(index, picture)
    assert sheet is not None  # noqa: S101
    return DecodedVideo(frames=sheet.frames, info=info, indices=indices)


def _picked(info: VideoInfo, pick: Callable[[VideoInfo], Sequence[int]], limits: MediaLimits) -> tuple[int, ...]:
    indices = tuple(int(index) for index in pick(info))
    if not indices:
        raise ConfigError(f"The frame rule picked no frame of a video with {info.frames}; it must pick at least one.")
    if min(indices) < 0 or max(indices) >= info.frames:
        raise BadSampleError(
            "decode", "frame_index", f"Frames {min(indices)}..{max(indices)} were asked of a video with {info.frames}."
        )
    limits.check_picked(info, len(indices))
    return indices
