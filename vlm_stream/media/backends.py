"""Libraries that decode videos, each behind the same two questions: the facts of a file, and some of its frames.

Enters: the bytes of one file, or its path. Leaves: frames [n, height, width, 3] uint8. Each counts frames by walking
the file's packets (containers lie about their number) and turns pictures as the file's display matrix says. Only
groups of pictures that hold a wanted frame are decoded, where the library can be trusted to begin at them. Must not be
known here: seconds of a file, limits, and which frames a model wants.
"""

from __future__ import annotations

import io
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from vlm_stream.clips import Colours, Sheet, gives_picture, open_file, parse_clip
from vlm_stream.errors import ConfigError, MissingExtraError, VlmStreamError, blame_sample
from vlm_stream.media.container import check_container
from vlm_stream.media.seconds import VideoInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    Frames = npt.NDArray[np.uint8]

_TOGETHER: Final = 8
"""Frames that decord is asked for at a time."""

VideoData: TypeAlias = bytes | bytearray | memoryview | str | Path
VideoBackend: TypeAlias = Literal["auto", "decord", "av", "torchcodec"]


def choose_backend(name: str) -> str:
    """Return the backend to use: the named one, by default PyAV."""
    if name == "auto":
        return "av"
    if name not in _OPENERS:
        raise ConfigError(f"There is no video backend '{name}'. Allowed: auto, {', '.join(_OPENERS)}.")
    if name == "decord" and find_spec(name) is None:
        raise ConfigError("decord has no release for this machine, so it decodes nothing. Use video_backend='av'.")
    if find_spec(name) is None:
        raise MissingExtraError(name, name, f"The video backend '{name}'")
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
def open_video(data: VideoData, backend: str, stage: str) -> Iterator[OpenVideo]:
    """Open one video; whatever the library raises on damaged bytes becomes a `BadSampleError` of that stage."""
    container = check_container(data, stage)
    video: OpenVideo | None = None
    try:
        video = _OPENERS[backend](data, container)
        yield video
    except VlmStreamError:
        raise
    except Exception as error:  # three libraries, each with its own tree of errors
        raise blame_sample(error, stage, "bad_video", f"The video cannot be decoded by {backend}") from error
    finally:
        if video is not None:
            video.close()


def _source(data: VideoData) -> Any:
    """Return what decord and torchcodec open; FFmpeg cannot take a full path for a protocol."""
    return io.BytesIO(data) if isinstance(data, (bytes, bytearray, memoryview)) else str(Path(data).absolute())


def _facts(num_frames: int, height: int, width: int, fps: float, seconds: float) -> VideoInfo:
    if num_frames < 1:
        raise ValueError("the file holds no video frames")
    return VideoInfo(num_frames, height, width, fps, num_frames / fps if fps > 0 else seconds)


class _Decord:
    """decord turns pictures itself."""

    def __init__(self, data: VideoData, container: str) -> None:
        import decord

        # One thread: workers are the parallelism, and decord's own threads would fight over the cores.
        self._reader = decord.VideoReader(_source(data), ctx=decord.cpu(0), num_threads=1)
        self._seeks = _may_seek("decord", data, container, len(self._reader))

    def facts(self) -> VideoInfo:
        height, width = self._reader[0].shape[:2]
        return _facts(len(self._reader), int(height), int(width), float(self._reader.get_avg_fps()), 0.0)

    def frames(self, indices: Sequence[int]) -> Frames:
        if self._seeks:  # in parts: decord's own memory is copied
            parts = (list(indices[begin : begin + _TOGETHER]) for begin in range(0, len(indices), _TOGETHER))
            pictures = chain.from_iterable(self._reader.get_batch(some).asnumpy() for some in parts)
            return _first_of(pictures, range(len(indices)))
        self._reader.seek(0)
        return _first_of((self._reader.next().asnumpy() for _ in count()), indices)

    def close(self) -> None:
        del self._reader


def _may_seek(backend: str, data: VideoData, container: str, num_frames: int) -> bool:
    """Tell whether a library other than PyAV finds the right frames of a clip by seeking.

    Behind a seek some give others where GOPs need those before them, or where the file lies about its keyframes.

    Raises:
        ValueError: It sees other frames than the file shows: no other library follows edit lists.
    """
    content = Path(data).read_bytes() if isinstance(data, (str, Path)) else bytes(data)
    table = parse_clip(content, container)
    if isinstance(table, str):
        return False
    if table.num_frames != num_frames or not table.shown.all():
        raise ValueError(f"{backend} sees other frames than the file shows; decode it with video_backend='av'")
    return table.is_plain


def _first_of(pictures: Iterator[Frames], indices: Sequence[int]) -> Frames:
    """Return some pictures of many, which come one after the other."""
    sheet: Sheet | None = None
    for index, picture in zip(range(max(indices) + 1), pictures, strict=False):
        sheet = sheet or Sheet(indices, *picture.shape[:2])
        if index in sheet.left:
            sheet.put(index, picture)
    if sheet is None or sheet.left:
        raise ValueError("the file ends before the last frame that is wanted")
    return sheet.frames


class AvVideo:
    """PyAV: packets are walked once for the time stamps, then each needed group of pictures is decoded."""

    def __init__(self, data: VideoData, container: str) -> None:
        self._data, self._format = data, container
        self._container, self._stream = self._open()
        self._codec = self._stream.codec_context.name
        self._colours = Colours()
        self._keyframes: list[int] = []
        stamps: list[int] = []
        for packet in self._container.demux(self._stream):
            stamp = packet.pts if packet.pts is not None else packet.dts
            if not packet.size or stamp is None or packet.is_discard or not gives_picture(packet, self._codec):
                continue
            stamps.append(stamp)
            if packet.is_keyframe:
                self._keyframes.append(stamp)
        self._stamps = sorted(stamps)
        self._position = {stamp: index for index, stamp in enumerate(self._stamps)}
        self._first: Frames | None = None

    def _open(self) -> tuple[Any, Any]:
        """Return the file at its front, and the stream of its pictures."""
        container = open_file(self._data, self._format)
        if not container.streams.video:
            container.close()
            raise ValueError("the file has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        return container, stream

    def facts(self) -> VideoInfo:
        """Return the facts of the file."""
        if self._first is None:
            found: dict[int, Frames] = {}
            self._decode([0], found.__setitem__)
            self._first = found[0]
        first = self._first
        rate = self._stream.average_rate or self._stream.guessed_rate
        duration = self._stream.duration
        seconds = float(duration * self._stream.time_base) if duration else 0.0
        return _facts(len(self._stamps), first.shape[0], first.shape[1], float(rate) if rate else 0.0, seconds)

    def frames(self, indices: Sequence[int]) -> Frames:
        """Return some frames, in the order of the indices."""
        if self._first is None:
            self.facts()
        first = cast("Frames", self._first)
        sheet = Sheet(indices, *first.shape[:2])
        sheet.put(0, first)
        self._decode(sorted(sheet.left), sheet.put)
        return sheet.frames

    def times(self) -> npt.NDArray[np.float64]:
        """Return [frames] when each is shown, in seconds from the first."""
        import numpy as np

        base = self._stream.time_base
        ticks: npt.NDArray[np.int64] = np.array(self._stamps, np.int64) - min(self._stamps, default=0)
        seconds: npt.NDArray[np.float64] = ticks * base.numerator / base.denominator
        return seconds

    def _decode(self, wanted: list[int], put: Callable[[int, Frames], None]) -> None:
        """Hand over the picture of each index."""
        import av

        if not self._stamps:
            raise ValueError("the file holds no video frames")
        left = set(wanted)
        with suppress(av.FFmpegError):  # what decoders say behind a seek to the wrong place
            while left:
                self._container.seek(self._stamps[min(left)], stream=self._stream)
                if not self._take(left, put):
                    break
        if left:
            # Edit lists, slow refreshes, missing tables: the keyframe that a seek finds is not always enough. A seek to
            # the front may miss it, too.
            self._container.close()
            self._container, self._stream = self._open()
            self._take(left, put, is_front=True)
        if left:
            raise ValueError(f"frame {min(left)} of {len(self._stamps)} could not be decoded")

    def _take(self, left: set[int], put: Callable[[int, Frames], None], *, is_front: bool = False) -> int:
        """Hand over frames of `left`, up to the first that another seek finds sooner; return how many."""
        before = len(left)
        for frame in self._container.decode(self._stream):
            index = self._position.get(frame.pts if frame.pts is not None else frame.dts)
            if index is not None and index in left:
                # The display matrix counts counter-clockwise.
                put(index, self._colours.to_array(frame, round(frame.rotation / 90) % 4))
                left.remove(index)
            if not left or (not is_front and self._next_needs_seek(index, min(left))):
                break
        return before - len(left)

    def _next_needs_seek(self, at: int | None, target: int) -> bool:
        """Say whether a keyframe lies between the frame just decoded and the next one wanted, or that one before it."""
        if at is None:
            return False
        if target < at:
            return True
        here, there = self._stamps[at], self._stamps[target]
        return any(here < stamp <= there for stamp in self._keyframes)

    def close(self) -> None:
        """Close the file."""
        self._container.close()


class _TorchCodec:
    """torchcodec, where FFmpeg's shared libraries are installed."""

    def __init__(self, data: VideoData, container: str) -> None:
        VideoDecoder = import_module("torchcodec.decoders").VideoDecoder  # noqa: N806

        source = bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else _source(data)
        self._decoder = VideoDecoder(source, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
        self._seeks = _may_seek("torchcodec", data, container, len(self._decoder))

    def facts(self) -> VideoInfo:
        height, width = self._decoder[0].shape[:2]
        meta = self._decoder.metadata
        return _facts(len(self._decoder), int(height), int(width), float(meta.average_fps or 0.0), 0.0)

    def frames(self, indices: Sequence[int]) -> Frames:
        if self._seeks:
            picked: Frames = self._decoder.get_frames_at(list(indices)).data.numpy()
            return picked
        return _first_of((self._decoder[index].numpy() for index in count()), indices)

    def close(self) -> None:
        del self._decoder


OpenVideo: TypeAlias = _Decord | AvVideo | _TorchCodec
_OPENERS: Final[dict[str, type[OpenVideo]]] = {"decord": _Decord, "av": AvVideo, "torchcodec": _TorchCodec}
