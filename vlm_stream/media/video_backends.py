"""The three libraries that decode videos, behind one small face: facts, then frames by index.

A backend counts frames by walking the file's packets (containers lie about their number), and turns pictures as the
file's display matrix says, so that all of them agree on the frames and on their order. Only `video.py` uses this.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from vlm_stream.errors import ConfigError, MissingExtraError, VlmStreamError, blame_sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

__all__ = ["choose_backend", "open_video"]

VideoData: TypeAlias = "bytes | bytearray | memoryview | str | Path"
Facts: TypeAlias = "tuple[int, int, int, float, float]"
_BACKENDS = ("decord", "av", "torchcodec")
_EXTRAS = {"decord": "video", "av": "video", "torchcodec": "torchcodec"}


class OpenVideo(Protocol):
    """What a backend offers once a file is open."""

    def facts(self) -> Facts:
        """Return frames, height, width, fps and seconds."""
        ...

    def frames(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return [n, height, width, 3]."""
        ...

    def close(self) -> None:
        """Free the decoder."""
        ...


def choose_backend(name: str) -> str:
    """Return the backend to use: the named one, or the first of decord and PyAV that is installed."""
    if name == "auto":
        for candidate in ("decord", "av"):
            if find_spec(candidate) is not None:
                return candidate
        raise MissingExtraError("av", "video", "Decoding video")
    if name not in _BACKENDS:
        raise ConfigError(f"There is no video backend '{name}'. Allowed: auto, {', '.join(_BACKENDS)}.")
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
def open_video(data: VideoData, backend: str, stage: str) -> Iterator[OpenVideo]:
    """Open one video; whatever the library raises on damaged bytes becomes a `BadSampleError` of that stage."""
    video: OpenVideo | None = None
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


def _facts(num_frames: int, height: int, width: int, fps: float, seconds: float) -> Facts:
    if num_frames < 1:
        raise ValueError("the file holds no video frames")
    return num_frames, height, width, fps, num_frames / fps if fps > 0 else seconds


class _Decord:
    """decord seeks well and is the fastest of the three on CPU; it turns pictures itself."""

    def __init__(self, data: VideoData) -> None:
        import decord

        # One thread: workers are the parallelism, and decord's own threads would fight over the cores.
        self._reader = decord.VideoReader(_source(data), ctx=decord.cpu(0), num_threads=1)

    def facts(self) -> Facts:
        height, width = self._reader[0].shape[:2]
        return _facts(len(self._reader), int(height), int(width), float(self._reader.get_avg_fps()), 0.0)

    def frames(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        batch: npt.NDArray[np.uint8] = self._reader.get_batch(list(indices)).asnumpy()
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
        self._first: npt.NDArray[np.uint8] | None = None

    def facts(self) -> Facts:
        self._first = first = self._decode([0])[0]
        rate = self._stream.average_rate or self._stream.guessed_rate
        duration = self._stream.duration
        seconds = float(duration * self._stream.time_base) if duration else 0.0
        return _facts(len(self._stamps), first.shape[0], first.shape[1], float(rate) if rate else 0.0, seconds)

    def frames(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        import numpy as np

        known = {} if self._first is None else {0: self._first}
        decoded = known | self._decode(sorted(set(indices) - known.keys()))
        return np.stack([decoded[index] for index in indices])

    def _decode(self, wanted: list[int]) -> dict[int, npt.NDArray[np.uint8]]:
        """Return {index: picture}; `wanted` ascends."""
        if not self._stamps:
            raise ValueError("the file holds no video frames")
        position = {stamp: index for index, stamp in enumerate(self._stamps)}
        left = set(wanted)
        found: dict[int, npt.NDArray[np.uint8]] = {}
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


def _turned(frame: Any) -> npt.NDArray[np.uint8]:
    import numpy as np

    picture: npt.NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    quarter_turns = round(getattr(frame, "rotation", 0) / 90) % 4  # the display matrix counts counter-clockwise
    return np.ascontiguousarray(np.rot90(picture, quarter_turns)) if quarter_turns else picture


class _TorchCodec:
    """torchcodec, where FFmpeg's shared libraries are installed."""

    def __init__(self, data: VideoData) -> None:
        VideoDecoder = import_module("torchcodec.decoders").VideoDecoder  # noqa: N806

        source = bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else str(data)
        self._decoder = VideoDecoder(source, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")

    def facts(self) -> Facts:
        height, width = self._decoder[0].shape[:2]
        meta = self._decoder.metadata
        return _facts(len(self._decoder), int(height), int(width), float(meta.average_fps or 0.0), 0.0)

    def frames(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        picked: npt.NDArray[np.uint8] = self._decoder.get_frames_at(list(indices)).data.numpy()
        return picked

    def close(self) -> None:
        del self._decoder


_OPENERS: Final[dict[str, Callable[[VideoData], OpenVideo]]] = {"decord": _Decord, "av": _Av, "torchcodec": _TorchCodec}
