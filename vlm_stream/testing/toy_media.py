"""Seeded media as bytes: images in the encodings that real datasets hold, h264 clips (made with PyAV), WAV sound.

Every picture is smooth colour with a few rectangles on it: it compresses as photographs do, and no two seeds agree.
"""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

_ONE: Final = 0x10000  # 1.0 in the 16.16 fixed point of a track's display matrix
_TURNS: Final = {0: (_ONE, 0, 0, _ONE), 90: (0, _ONE, -_ONE, 0), 180: (-_ONE, 0, 0, -_ONE), 270: (0, -_ONE, _ONE, 0)}
_TICKS_PER_SECOND: Final = 90_000
_AUDIO_RATE: Final = 16_000
_AUDIO_CHUNK: Final = 1024  # what the encoder takes at once


def make_toy_pixels(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return [height, width, 3] pixels."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3)).astype(np.float32)
    down = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    across = np.linspace(0, 1, width, dtype=np.float32)[None, :, None]
    upper = corners[0, 0] * (1 - across) + corners[0, 1] * across  # [1, width, 3]
    lower = corners[1, 0] * (1 - across) + corners[1, 1] * across
    pixels: npt.NDArray[np.uint8] = (upper * (1 - down) + lower * down).astype(np.uint8)  # [height, width, 3]
    for _ in range(4):
        top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
        tall, wide = int(rng.integers(1, height // 2 + 2)), int(rng.integers(1, width // 2 + 2))
        pixels[top : top + tall, left : left + wide] = rng.integers(0, 256, 3)
    return pixels


def make_toy_image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an RGB image.

    >>> make_toy_image(48, 64).size
    (64, 48)
    """
    from PIL import Image

    return Image.fromarray(make_toy_pixels(height, width, seed))


def save_image(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return the file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def make_jpeg(height: int, width: int, seed: int = 0, *, quality: int = 85) -> bytes:
    """Return a JPEG.

    >>> make_jpeg(48, 64)[:2].hex()
    'ffd8'
    """
    return save_image(make_toy_image(height, width, seed), "JPEG", quality=quality)


def make_grey_jpeg(height: int, width: int, seed: int = 0) -> bytes:
    """Return a JPEG with one channel."""
    return save_image(make_toy_image(height, width, seed).convert("L"), "JPEG")


def make_png_with_alpha(height: int, width: int, seed: int = 0) -> bytes:
    """Return a PNG with four channels, transparent on the left and opaque on the right."""
    image = make_toy_image(height, width, seed)
    alpha = np.broadcast_to(np.linspace(0, 255, width).astype(np.uint8), (height, width))
    from PIL import Image

    image.putalpha(Image.fromarray(np.ascontiguousarray(alpha)))
    return save_image(image, "PNG")


def make_palette_png(height: int, width: int, seed: int = 0) -> bytes:
    """Return a PNG whose pixels are numbers of a palette, one of them transparent."""
    return save_image(make_toy_image(height, width, seed).quantize(16), "PNG", transparency=0)


def make_toy_wave(num_samples: int, rate: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return [num_samples] values between -1 and 1: three tones that swell and fade."""
    rng = np.random.default_rng(seed)
    seconds = np.arange(num_samples) / rate
    tones = [np.sin(2 * np.pi * pitch * seconds + phase) for pitch, phase in rng.uniform(1, 1000, (3, 2))]
    swell = 0.5 - 0.5 * np.cos(2 * np.pi * seconds)
    sound: npt.NDArray[np.float32] = (np.mean(tones, axis=0) * swell * 0.8).astype(np.float32)
    return sound


def make_wav(seconds: float, *, rate: int = 16000, channels: int = 1, seed: int = 0) -> bytes:
    """Return a WAV file of 16-bit samples.

    >>> make_wav(0.5)[:4]
    b'RIFF'
    """
    num_samples = round(seconds * rate)
    lanes = [make_toy_wave(num_samples, rate, seed + channel) for channel in range(channels)]
    frames = (np.stack(lanes, axis=1) * 32767).astype("<i2")  # [num_samples, channels]
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(frames.tobytes())
    return buffer.getvalue()


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
