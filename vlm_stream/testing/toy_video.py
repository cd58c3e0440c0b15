"""Seeded h264 clips as bytes, made with PyAV: enters a `ClipSpec` (or its fields), leaves an mp4 file's content."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import ConfigError
from vlm_stream.testing.parts import require_package
from vlm_stream.testing.toy_audio import make_toy_wave
from vlm_stream.testing.toy_images import make_toy_pixels

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

__all__ = ["ClipSpec", "make_mp4"]

_ONE: Final = 0x10000  # 1.0 in the 16.16 fixed point of a track's display matrix
_TURNS: Final = {0: (_ONE, 0, 0, _ONE), 90: (0, _ONE, -_ONE, 0), 180: (-_ONE, 0, 0, -_ONE), 270: (0, -_ONE, _ONE, 0)}
_TICKS_PER_SECOND: Final = 90_000
_AUDIO_RATE: Final = 16_000
_AUDIO_CHUNK: Final = 1024  # what the encoder takes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSpec:
    """What a toy clip looks like."""

    num_frames: int = 16
    """Frames in the file."""
    height: int = 64
    """Stored height; h264 wants an even number."""
    width: int = 96
    """Stored width; h264 wants an even number."""
    fps: float = 8.0
    """Frames per second (their mean, if the rate varies)."""
    gop: int = 8
    """Frames from one key frame to the next."""
    with_audio: bool = False
    """Add an AAC track of the same length."""
    rotation: int = 0
    """Degrees that a player must turn the picture clockwise: 0, 90, 180 or 270."""
    variable_rate: bool = False
    """Alternate short and long frames."""
    seed: int = 0
    """Chooses the picture and the sound."""

    def __post_init__(self) -> None:
        """Refuse what the encoder could not write."""
        if self.num_frames < 1 or self.height < 2 or self.width < 2 or self.height % 2 or self.width % 2:
            raise ConfigError(
                f"A clip of {self.num_frames} frames of {self.height}x{self.width} cannot be encoded: "
                "h264 wants at least one frame and even sides. Round the sides to even numbers."
            )
        if self.rotation not in _TURNS:
            raise ConfigError(f"A clip cannot be turned by {self.rotation} degrees: use 0, 90, 180 or 270.")


def make_mp4(spec: ClipSpec | None = None, **fields: Any) -> bytes:
    """Return an mp4 with one h264 track. Frame `i` carries its number, see `read_frame_number`.

    Args:
        spec: What to make; or give its fields as keywords.
        **fields: Fields of `ClipSpec`.

    Example:
        >>> make_mp4(num_frames=4, height=32, width=32)[4:8]
        b'ftyp'
    """
    require_package("av", "video", "Making a toy clip")
    import av

    spec = ClipSpec(**fields) if spec is None else spec
    rate = Fraction(spec.fps).limit_denominator(1001)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        video = container.add_stream("libx264", rate=rate)
        video.height, video.width, video.pix_fmt = spec.height, spec.width, "yuv420p"
        video.time_base = video.codec_context.time_base = Fraction(1, _TICKS_PER_SECOND)
        # One thread, because slices depend on the number of cores; no look-ahead, because its macroblock tree reads
        # memory that it has not written, and two clips of one spec would differ.
        steady = {"threads": "1", "x264-params": "no-mbtree=1:rc-lookahead=0"}
        video.options = {"g": str(spec.gop), "preset": "veryfast", "crf": "20", **steady}
        audio = container.add_stream("aac", rate=_AUDIO_RATE, layout="mono") if spec.with_audio else None
        for pixels, tick in zip(_make_frames(spec), _frame_ticks(spec), strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = tick, Fraction(1, _TICKS_PER_SECOND)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None:
            _add_sound(container, audio, spec)
    content = buffer.getvalue()
    return _turn(content, spec.rotation) if spec.rotation else content


def _make_frames(spec: ClipSpec) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield [height, width, 3] frames: one picture that moves, with the frame's number in its upper left corner."""
    base = make_toy_pixels(spec.height, spec.width, spec.seed)
    side = _mark_side(spec.height, spec.width)
    for number in range(spec.num_frames):
        pixels = np.roll(base, 3 * number, axis=1)
        for bit in range(8):
            pixels[:side, bit * side : (bit + 1) * side] = 255 * (number >> bit & 1)
        yield pixels


def _mark_side(height: int, width: int) -> int:
    return max(1, min(height, width // 8, 16))


def read_frame_number(pixels: npt.NDArray[np.uint8]) -> int:
    """Read the number (modulo 256) that `make_mp4` has drawn into a frame: [height, width, 3]."""
    side = _mark_side(*pixels.shape[:2])
    bits = [pixels[:side, bit * side : (bit + 1) * side].mean() > 127 for bit in range(8)]
    return sum(1 << bit for bit, is_set in enumerate(bits) if is_set)


def _frame_ticks(spec: ClipSpec) -> list[int]:
    numbers = np.arange(spec.num_frames, dtype=np.float64)
    if spec.variable_rate:
        numbers += 0.5 * (np.arange(spec.num_frames) % 2)
    return [int(tick) for tick in np.rint(numbers / spec.fps * _TICKS_PER_SECOND)]


def _add_sound(container: Any, stream: Any, spec: ClipSpec) -> None:
    import av

    sound = make_toy_wave(round(spec.num_frames / spec.fps * _AUDIO_RATE), _AUDIO_RATE, spec.seed)
    for begin in range(0, len(sound), _AUDIO_CHUNK):
        chunk = sound[None, begin : begin + _AUDIO_CHUNK]  # [1, samples]
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(chunk), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = _AUDIO_RATE, begin, Fraction(1, _AUDIO_RATE)
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def _turn(content: bytes, rotation: int) -> bytes:
    """Write the display matrix of the first track (the video) into its `tkhd` box."""
    box = content.index(b"tkhd")
    version = content[box + 4]
    matrix = box + (52 if version == 1 else 40) + 4
    a, b, c, d = _TURNS[rotation]
    return content[:matrix] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 0x40000000) + content[matrix + 36 :]
