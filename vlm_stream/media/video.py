"""Videos: bytes to the frames that a rule picks, and the facts that the rule and the processor need.

Enters: the bytes of one file (or its path, or a list of still frames) and `pick`, which sees the facts and names frame
indices. Leaves: frames [n, height, width, 3] uint8 and the facts. Three libraries can decode; each counts frames by
walking the file's packets (containers lie about their number) and turns pictures as the file's display matrix says, so
all give the same frames for the same indices. Only groups of pictures that hold a picked frame are decoded. The
sampling rule itself is not known here.
"""

from __future__ import annotations

import io
import math
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from vlm_stream.errors import BadSampleError, ConfigError, MissingExtraError, VlmStreamError, blame_sample
from vlm_stream.media.image import DEFAULT_IMAGE_CONFIG, ImageConfig, decode_image, probe_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    Frames = npt.NDArray[np.uint8]

__all__ = ["DecodedVideo", "VideoBackend", "VideoInfo", "decode_frame_list", "decode_video", "probe_video"]

VideoData: TypeAlias = "bytes | bytearray | memoryview | str | Path"
VideoBackend: TypeAlias = Literal["auto", "decord", "av", "torchcodec"]
_EXTRAS: Final = {"decord": "video", "av": "video", "torchcodec": "torchcodec"}


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

    frames: Frames
    """[n, height, width, 3]"""
    info: VideoInfo
    indices: tuple[int, ...]
    """Which frame of the file each of the n is; the last may repeat."""


def probe_video(data: VideoData, backend: VideoBackend = "auto") -> VideoInfo:
    """Return the facts, or raise `BadSampleError`; one picture is decoded: only pictures say how they are turned."""
    with _open(data, _choose_backend(backend), stage="convert") as video:
        return video.facts()


def decode_video(
    data: VideoData, pick: Callable[[VideoInfo], Sequence[int]], backend: VideoBackend = "auto"
) -> DecodedVideo:
    """Decode the frames whose indices `pick` names for this video, in that order."""
    with _open(data, _choose_backend(backend), stage="decode") as video:
        info = video.facts()
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


def _choose_backend(name: str) -> str:
    """Return the backend to use: the named one, or the first of decord and PyAV that is installed."""
    if name == "auto":
        for candidate in ("decord", "av"):
            if find_spec(candidate) is not None:
                return candidate
        raise MissingExtraError("av", "video", "Decoding video")
    if name not in _EXTRAS:
        raise ConfigError(f"There is no video backend '{name}'. Allowed: auto, {', '.join(_EXTRAS)}.")
    if find_spec(name) is None:
        raise MissingExtraError(name, _EXTRAS[name], f"The video backend '{name}'")
    if name == "torchcodec":
        _check_torchcodec()
    return name


def _check_torchcodec() -> None:
    """Refuse a torchcodec without FFmpeg's libraries at once: else every video would look like a bad sample."""
    try:
        import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            "The video backend 'torchcodec' is installed and cannot be loaded, so no video can be decoded with it: it "
            "needs FFmpeg's shared libraries. Install them (Debian: apt-get install ffmpeg), or use 'av' or 'decord'."
        ) from error


@contextmanager
def _open(data: VideoData, backend: str, stage: str) -> Iterator[_OpenVideo]:
    """Open one video; whatever the library raises on damaged bytes becomes a `BadSampleError` of that stage."""
    video: _OpenVideo | None = None
    try:
        video = _OPENERS[backend](data)
        yield video
    except VlmStreamError:
        raise
    except Exception as error:  # three libraries, each with its own tree of errors
        raise blame_sample(error, stage, "bad_video", f"The video cannot be decoded by {backend}") from error
    finally:
        if video is not None:
            video.close()


def _source(data: VideoData) -> Any:
    return io.BytesIO(data) if isinstance(data, (bytes, bytearray, memoryview)) else str(data)


def _facts(num_frames: int, height: int, width: int, fps: float, seconds: float) -> VideoInfo:
    if num_frames < 1:
        raise ValueError("the file holds no video frames")
    return VideoInfo(num_frames, height, width, fps, num_frames / fps if fps > 0 else seconds)


class _Decord:
    """decord seeks well and is the fastest of the three on CPU; it turns pictures itself."""

    def __init__(self, data: VideoData) -> None:
        import decord

        # One thread: workers are the parallelism, and decord's own threads would fight over the cores.
        self._reader = decord.VideoReader(_source(data), ctx=decord.cpu(0), num_threads=1)

    def facts(self) -> VideoInfo:
        height, width = self._reader[0].shape[:2]
        return _facts(len(self._reader), int(height), int(width), float(self._reader.get_avg_fps()), 0.0)

    def frames(self, indices: Sequence[int]) -> Frames:
        batch: Frames = self._reader.get_batch(list(indices)).asnumpy()
        return batch

    def close(self) -> None:
        del self._reader


class _Av:
    """PyAV: packets are walked once for the time stamps, then each needed group of pictures is decoded."""

    def __init__(self, data: VideoData) -> None:
        import av

        self._container = av.open(_source(data))
        if not self._container.streams.video:
            self._container.close()
            raise ValueError("the file has no video stream")
        self._stream = self._container.streams.video[0]
        self._stream.thread_type = "NONE"
        self._keyframes: list[int] = []
        stamps: list[int] = []
        for packet in self._container.demux(self._stream):
            stamp = packet.pts if packet.pts is not None else packet.dts
            if not packet.size or stamp is None or packet.is_discard:
                continue
            stamps.append(stamp)
            if packet.is_keyframe:
                self._keyframes.append(stamp)
        self._stamps = sorted(stamps)
        self._first: Frames | None = None

    def facts(self) -> VideoInfo:
        self._first = first = self._decode([0])[0]
        rate = self._stream.average_rate or self._stream.guessed_rate
        duration = self._stream.duration
        seconds = float(duration * self._stream.time_base) if duration else 0.0
        return _facts(len(self._stamps), first.shape[0], first.shape[1], float(rate) if rate else 0.0, seconds)

    def frames(self, indices: Sequence[int]) -> Frames:
        import numpy as np

        known = {} if self._first is None else {0: self._first}
        decoded = known | self._decode(sorted(set(indices) - known.keys()))
        return np.stack([decoded[index] for index in indices])

    def _decode(self, wanted: list[int]) -> dict[int, Frames]:
        """Return {index: picture}; `wanted` ascends."""
        if not self._stamps:
            raise ValueError("the file holds no video frames")
        position = {stamp: index for index, stamp in enumerate(self._stamps)}
        left = set(wanted)
        found: dict[int, Frames] = {}
        while left:
            target = self._stamps[min(left)]
            self._container.seek(target, stream=self._stream)
            before = len(left)
            for frame in self._container.decode(self._stream):
                index = position.get(frame.pts if frame.pts is not None else frame.dts)
                if index in left:
                    found[index] = _turned(frame)
                    left.remove(index)
                if not left or self._next_needs_seek(index, min(left)):
                    break
            if len(left) == before:
                raise ValueError(f"frame {min(left)} of {len(self._stamps)} could not be decoded")
        return found

    def _next_needs_seek(self, at: int | None, target: int) -> bool:
        """Say whether a keyframe lies between the frame just decoded and the next one wanted."""
        if at is None:
            return False
        here, there = self._stamps[at], self._stamps[target]
        return any(here < stamp <= there for stamp in self._keyframes)

    def close(self) -> None:
        self._container.close()


def _turned(frame: Any) -> Frames:
    import numpy as np

    picture: Frames = frame.to_ndarray(format="rgb24")
    quarter_turns = round(getattr(frame, "rotation", 0) / 90) % 4  # the display matrix counts counter-clockwise
    return np.ascontiguousarray(np.rot90(picture, quarter_turns)) if quarter_turns else picture


class _TorchCodec:
    """torchcodec, where FFmpeg's shared libraries are installed."""

    def __init__(self, data: VideoData) -> None:
        VideoDecoder = import_module("torchcodec.decoders").VideoDecoder  # noqa: N806

        source = bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else str(data)
        self._decoder = VideoDecoder(source, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")

    def facts(self) -> VideoInfo:
        height, width = self._decoder[0].shape[:2]
        meta = self._decoder.metadata
        return _facts(len(self._decoder), int(height), int(width), float(meta.average_fps or 0.0), 0.0)

    def frames(self, indices: Sequence[int]) -> Frames:
        picked: Frames = self._decoder.get_frames_at(list(indices)).data.numpy()
        return picked

    def close(self) -> None:
        del self._decoder


_OpenVideo: TypeAlias = _Decord | _Av | _TorchCodec
_OPENERS: Final[dict[str, type[_OpenVideo]]] = {"decord": _Decord, "av": _Av, "torchcodec": _TorchCodec}
