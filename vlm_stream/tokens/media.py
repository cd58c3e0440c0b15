"""Media as headers tell them: sizes of one sample, of many as the columns of an index, and which frames are sampled.

Lists of media are ragged: row `i` owns the entries `splits[i]:splits[i + 1]`. For three samples with 2, 0 and 1 images
`image_splits` is `[0, 2, 2, 3]` and `image_sizes` has three rows.

`count_frames(...) == len(frame_indices(...))` always: planning counts without opening a clip, decoding picks. A
clip never gives more frames than it has; a temporal patch that lacks some is filled by repeating the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import BadSampleError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.tokens.geometry import Geometry

__all__ = [
    "ASSUMED_FPS",
    "AudioSize",
    "FrameRule",
    "ImageSize",
    "MediaColumns",
    "MediaSizes",
    "VideoSize",
    "check_media_sizes",
    "count_frames",
    "frame_indices",
    "join_columns",
    "make_columns",
    "make_video_metadata",
]

_SPLITS: Final = ("image_splits", "video_splits", "audio_splits")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """An image's header: pixels, as decoding gives them."""

    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSize:
    """A clip's header."""

    frames: int
    height: int
    width: int
    fps: float = 0.0
    """Frames per second; 0 if the file does not say."""
    seconds: float = 0.0
    """Duration; 0 if the file does not say."""
    picked: tuple[int, ...] = ()
    """Frames that the sample names itself; empty: the rule samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSize:
    """A sound's header."""

    samples: int
    """Samples of one channel."""
    rate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSizes:
    """All media of one sample, each kind in the order in which the conversation shows it."""

    images: tuple[ImageSize, ...] = ()
    videos: tuple[VideoSize, ...] = ()
    audios: tuple[AudioSize, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaColumns:
    """Text counts and media sizes of n samples, straight from an index; all splits are [n + 1]."""

    text_tokens: npt.NDArray[np.int64]
    """[n] Everything but embeddings, plus one for every medium: the rendered chat, marks around media, timestamps."""
    label_tokens: npt.NDArray[np.int64]
    """[n] How many of them are labels: the answers that are to be learned, with their stop tokens. -1: unknown."""
    image_splits: npt.NDArray[np.int64]
    image_sizes: npt.NDArray[np.int64]
    """[images, 2] Height and width, as stored."""
    video_splits: npt.NDArray[np.int64]
    video_sizes: npt.NDArray[np.int64]
    """[videos, 3] Frames, height and width, as stored."""
    video_fps: npt.NDArray[np.float64]
    """[videos] Frames per second; 0 where the file does not say."""
    video_seconds: npt.NDArray[np.float64]
    """[videos] Duration."""
    video_picked: npt.NDArray[np.int64]
    """[videos] Number of frames that the sample names itself (`frame_indices`, a frame list); 0: the rule samples."""
    audio_splits: npt.NDArray[np.int64]
    audio_sizes: npt.NDArray[np.int64]
    """[audios, 2] Samples and sampling rate."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.text_tokens)


def check_media_sizes(sizes: MediaSizes, geometry: Geometry) -> None:
    """Raise if the processor would refuse one of a sample's media.

    Without a known processor the common limits hold: no empty media, no sides further apart than 200 to 1.

    Args:
        sizes: The sample's media.
        geometry: Of the processor that will read them.

    Raises:
        BadSampleError: At the stage "convert", with the reason "empty_medium", "extreme_shape" or
            "unsupported_medium".
    """
    kinds: tuple[tuple[str, tuple[ImageSize | VideoSize, ...], Any], ...] = (
        ("image", sizes.images, geometry.image),
        ("video", sizes.videos, geometry.video),
    )
    for kind, media, rule in kinds:
        for number, medium in enumerate(media):
            name = f"The {kind} number {number + 1}"
            if min(medium.height, medium.width) < 1:
                raise BadSampleError(
                    "convert", "empty_medium", f"{name} has {medium.height}x{medium.width} pixels and cannot be used."
                )
            if rule is None:
                _refuse_kind(name, geometry)
            elif problem := rule.find_problem(medium.height, medium.width):
                who = "many processors refuse" if geometry.family == "unknown" else f"{geometry.family} refuses"
                detail = f"{name} cannot be used: {problem}, which {who}. Crop or pad it before conversion."
                raise BadSampleError("convert", "extreme_shape", detail)
    for number, sound in enumerate(sizes.audios):
        name = f"The audio number {number + 1}"
        if sound.samples < 1 or sound.rate < 1:
            detail = f"{name} has {sound.samples} samples at {sound.rate} Hz and cannot be used."
            raise BadSampleError("convert", "empty_medium", detail)
        if geometry.audio is None:
            _refuse_kind(name, geometry)


def _refuse_kind(name: str, geometry: Geometry) -> None:
    raise BadSampleError(
        "convert",
        "unsupported_medium",
        f"{name} cannot be used: the {geometry.family} processor reads no such medium. "
        "Convert for another processor, or leave such samples out.",
    )


def make_columns(sizes: Sequence[MediaSizes], text_tokens: Sequence[int]) -> MediaColumns:
    """Return the columns that an index of these samples would have (for few samples; an index has its own reader).

    Labels are unknown.
    """

    def splits(numbers: list[int]) -> npt.NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(numbers)]).astype(np.int64)

    images = [(image.height, image.width) for sample in sizes for image in sample.images]
    videos = [video for sample in sizes for video in sample.videos]
    audios = [(audio.samples, audio.rate) for sample in sizes for audio in sample.audios]
    return MediaColumns(
        text_tokens=np.asarray(text_tokens, np.int64),
        label_tokens=np.full(len(sizes), -1, np.int64),
        image_splits=splits([len(sample.images) for sample in sizes]),
        image_sizes=np.asarray(images, np.int64).reshape(-1, 2),
        video_splits=splits([len(sample.videos) for sample in sizes]),
        video_sizes=np.asarray([(v.frames, v.height, v.width) for v in videos], np.int64).reshape(-1, 3),
        video_fps=np.asarray([video.fps for video in videos], np.float64),
        video_seconds=np.asarray([video.seconds for video in videos], np.float64),
        video_picked=np.asarray([len(video.picked) for video in videos], np.int64),
        audio_splits=splits([len(sample.audios) for sample in sizes]),
        audio_sizes=np.asarray(audios, np.int64).reshape(-1, 2),
    )


def join_columns(parts: Sequence[MediaColumns]) -> MediaColumns:
    """Join columns end to end: counting many small indexes at once costs little more than counting one."""

    def join(name: str) -> Any:
        if name not in _SPLITS:
            return np.concatenate([getattr(part, name) for part in parts])
        counts = np.concatenate([np.diff(getattr(part, name)) for part in parts])
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])

    return MediaColumns(**{name: join(name) for name in MediaColumns.__dataclass_fields__})


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
