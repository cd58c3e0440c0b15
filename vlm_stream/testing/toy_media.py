"""Seeded media as bytes: images in the encodings that real datasets hold, h264 clips (made with PyAV), WAV sound.

Every picture is smooth colour with a few rectangles on it: it compresses as photographs do, and no two seeds agree.

`make_toy_dataset` takes a folder and a seed and writes a dataset of them:

<folder>/meta.json         three entries, in three forms
<folder>/captions.jsonl    role/content messages; one image, several images, system turns
<folder>/dialogues.json    a JSON array; conversations/from/value through columns and tags; several turns, text only
<folder>/clips.jsonl       videos, frame picks, videos beside images, text only
<folder>/media/            JPEG and PNG files of many sizes, a few mp4 clips
"""

from __future__ import annotations

import io
import json
import struct
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
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


def make_mp4(**fields: Any) -> bytes:
    """Return an mp4 with one h264 track. Frame `i` carries its number, see `read_frame_number`.

    Args:
        **fields: Those of `ClipSpec`.

    Example:
        >>> make_mp4(num_frames=4, height=32, width=32)[4:8]
        b'ftyp'
    """
    import av

    spec = ClipSpec(**fields)
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


_WORDS: Final = (
    "the a red blue small large square circle line street house river chart table shows has with above below left "
    "right of two three seven people signs windows and but while slowly then again bright dark value total"
)
_SIDES: Final = (28, 56, 64, 96, 100, 127, 160, 224, 256, 320, 333, 448)
_CLIPS: Final[tuple[dict[str, Any], ...]] = (
    {"num_frames": 2, "height": 48, "width": 64, "fps": 4.0},
    {"num_frames": 12, "height": 64, "width": 96, "fps": 8.0, "seed": 1},
    {"num_frames": 24, "height": 96, "width": 64, "fps": 12.5, "seed": 2, "with_audio": True},
    {"num_frames": 40, "height": 56, "width": 56, "fps": 10.0, "seed": 3, "variable_rate": True},
)
_TAGS: Final = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}


@dataclass(frozen=True, slots=True)
class _Toys:
    """The dataset under construction: the generator that decides everything, and the files so far."""

    folder: Path
    rng: np.random.Generator

    def say(self, least: int, most: int) -> str:
        words = self.rng.choice(_WORDS.split(), int(self.rng.integers(least, most + 1)))
        return " ".join(str(word) for word in words).capitalize() + "."

    def add_image(self, stem: str) -> str:
        height, width = (int(side) for side in self.rng.choice(_SIDES, 2))
        kind = self.rng.integers(0, 12)
        makers: dict[int, tuple[Callable[..., bytes], str]] = {
            0: (make_png_with_alpha, "png"),
            1: (make_palette_png, "png"),
            2: (make_grey_jpeg, "jpg"),
        }
        make, ending = makers.get(int(kind), (make_jpeg, "jpg"))
        name = f"{stem}.{ending}"
        (self.folder / "media" / name).write_bytes(make(height, width, int(self.rng.integers(2**31))))
        return name


def make_toy_dataset(folder: str | Path, num_samples: int = 200, seed: int = 0) -> Path:
    """Write a toy dataset and return the path of its meta file.

    The same arguments give the same bytes. The first samples of each entry show all its kinds, so a dataset of a dozen
    samples has images, videos, several turns and plain text.

    Args:
        folder: Created if it does not exist.
        num_samples: Samples of all entries together, at least 3.
        seed: Chooses texts, sizes and pictures.

    Example:
        >>> import tempfile
        >>> meta = make_toy_dataset(tempfile.mkdtemp(), num_samples=12)
        >>> sorted(json.loads(meta.read_text()))
        ['captions', 'clips', 'dialogues']
    """
    if num_samples < 3:
        raise ConfigError(f"A toy dataset has three entries, and {num_samples} samples do not fill them: ask for 3.")
    folder = Path(folder)
    (folder / "media").mkdir(parents=True, exist_ok=True)
    toys = _Toys(folder, np.random.default_rng(seed))
    for number, clip in enumerate(_CLIPS):
        (folder / "media" / f"clip-{number}.mp4").write_bytes(make_mp4(**clip))
    num_clips = max(1, num_samples // 8)
    num_captions = max(1, num_samples // 2)
    num_dialogues = max(1, num_samples - num_captions - num_clips)
    num_captions = num_samples - num_dialogues - num_clips
    _write_jsonl(folder / "captions.jsonl", [_make_caption(toys, number) for number in range(num_captions)])
    _write_json(folder / "dialogues.json", [_make_dialogue(toys, number) for number in range(num_dialogues)])
    _write_jsonl(folder / "clips.jsonl", [_make_clip_sample(toys, number) for number in range(num_clips)])
    meta = {
        "captions": {"file_name": "captions.jsonl", "media_dir": "media"},
        "dialogues": {
            "file_name": "dialogues.json",
            "columns": {"messages": "conversations", "images": "image"},
            "tags": _TAGS,
            "media_dir": "media",
        },
        "clips": {"file_name": "clips.jsonl", "media_dir": "media"},
    }
    return _write_json(folder / "meta.json", meta)


def _make_caption(toys: _Toys, number: int) -> dict[str, Any]:
    num_images = (1, 3, 1, 2)[number % 4]
    images = [toys.add_image(f"caption-{number:06d}-{place}") for place in range(num_images)]
    question = "<image>" * num_images + "\n" + toys.say(3, 12)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": toys.say(4, 60)}]
    if number % 3 == 2:
        messages.insert(0, {"role": "system", "content": toys.say(3, 9)})
    return {"id": f"caption-{number}", "messages": messages, "images": images}


def _make_dialogue(toys: _Toys, number: int) -> dict[str, Any]:
    images = [toys.add_image(f"dialogue-{number:06d}")] if number % 3 else []
    turns = []
    for turn in range(1 + number % 4):
        question = toys.say(2, 10)
        if images and turn == 0:
            question = f"{question} <image>" if number % 2 else f"<image>\n{question}"
        turns += [{"from": "human", "value": question}, {"from": "gpt", "value": toys.say(3, 80)}]
    return {"id": f"dialogue-{number}", "conversations": turns, "image": images}


def _make_clip_sample(toys: _Toys, number: int) -> dict[str, Any]:
    sample: dict[str, Any] = {"images": [], "videos": []}
    question = toys.say(3, 8)
    if number % 5 != 3:
        clip: Any = f"clip-{number % len(_CLIPS)}.mp4"
        if number % 5 == 2:
            clip = {"path": clip, "frame_indices": [0, 5, 10, 20]}
        sample["videos"] = [clip]
        question = f"<video>{question}"
    if number % 5 == 4:
        sample["images"] = [toys.add_image(f"clip-{number:06d}")]
        question = f"<image>{question}"
    sample["messages"] = [{"role": "user", "content": question}, {"role": "assistant", "content": toys.say(4, 40)}]
    return sample


def _write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return path


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
