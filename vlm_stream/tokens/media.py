"""Media as headers tell them: sizes of one sample, of many as the columns of an index, and which frames are sampled.

Lists of media are ragged: row `i` owns the entries `splits[i]:splits[i + 1]`. For three samples with 2, 0 and 1 images
`image_splits` is `[0, 2, 2, 3]` and `image_sizes` has three rows.

`count_frames(...) == len(frame_indices(...))` always: planning counts without opening a clip, decoding picks. A
clip never gives more frames than it has; a temporal patch that lacks some is filled by repeating the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import BadSampleError, ConfigError, DatasetError


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
    fps: float = 0.0  # frames per second; 0 if the file does not say
    seconds: float = 0.0  # duration; 0 if the file does not say
    picked: tuple[int, ...] = ()  # frames that the sample names itself; empty: the rule samples
    keyframes: tuple[int, ...] = ()  # frames that need no other, ascending; empty: not known, or not read


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSize:
    """A sound's header."""

    samples: int  # samples of one channel
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
    video_gops: npt.NDArray[np.int64] | None = None
    """[videos] Groups of pictures; 0: not known; below 0: of a part of a file. None: of none."""
    video_keyframes: npt.NDArray[np.object_] | None = None
    """[videos] Frames that need no other, as `pack_steps` writes them; empty: not known. None: not read."""

    def __len__(self) -> int:
        return len(self.text_tokens)

    def pick(self, rows: npt.NDArray[np.int64]) -> MediaColumns:
        """Return some of the samples, in ascending order of their rows; whole numbers have their full width."""
        is_picked = np.zeros(len(self), dtype=bool)
        is_picked[rows] = True
        found: dict[str, Any] = {"text_tokens": self.text_tokens[rows], "label_tokens": self.label_tokens[rows]}
        for kind in ("image", "video", "audio"):
            num_media = np.diff(getattr(self, f"{kind}_splits"))
            items = np.repeat(is_picked, num_media)
            found |= {
                name: each[items] for name, each in self._arrays() if name.startswith(kind) and "splits" not in name
            }
            found[f"{kind}_splits"] = np.concatenate([[0], np.cumsum(num_media[rows])])
        return MediaColumns(
            **{name: each.astype(np.int64) if each.dtype == np.int32 else each for name, each in found.items()}
        )

    def narrowed(self) -> MediaColumns:
        """Return the same numbers in half of the memory, to be picked from."""
        narrow: dict[str, Any] = {
            name: each.astype(np.int32)
            for name, each in self._arrays()
            if each.dtype == np.int64 and (not each.size or (each.min() >= -(2**31) and each.max() < 2**31))
        }
        return replace(self, **narrow)

    def _arrays(self) -> list[tuple[str, npt.NDArray[Any]]]:
        values = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return [(name, each) for name, each in values if each is not None]


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
        video_keyframes=as_objects([pack_steps(video.keyframes) for video in videos]),
        audio_splits=splits([len(sample.audios) for sample in sizes]),
        audio_sizes=np.asarray(audios, np.int64).reshape(-1, 2),
    )


def pack_steps(places: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return ascending numbers as the first of them, then pairs: a step, and how many times it is taken.

    >>> pack_steps([0, 50, 100, 150, 160]).tolist()
    [0, 50, 3, 10, 1]
    """
    steps = np.diff(np.asarray(places, np.int64))
    begins = np.flatnonzero(np.diff(steps, prepend=0))
    times = np.diff(begins, append=len(steps))
    pairs = np.stack([steps[begins], times], axis=1).ravel()
    return np.concatenate([np.asarray(places[:1], np.int64), pairs]).astype(np.int32)


def unpack_steps(packed: npt.NDArray[np.int32], total: int) -> list[int]:
    """Return the numbers that `pack_steps` was given.

    Raises:
        DatasetError: They are not ascending numbers below the total.
    """
    first, steps, times = (packed[at].astype(np.int64) for at in (slice(1), slice(1, None, 2), slice(2, None, 2)))
    is_right = len(steps) == len(times) and not (first < 0).any() and min([*steps, *times, 1]) > 0
    if not is_right or sum(first.tolist()) + sum(map(mul, steps.tolist(), times.tolist())) >= max(total, 1):
        raise DatasetError(
            f"an index tells of keyframes that a clip of {total} frames cannot have: it was damaged or made by "
            f"something else. Write it again with: vlm-stream index"
        )
    places: list[int] = np.cumsum(np.concatenate([first, np.repeat(steps, times)])).tolist()
    return places


def as_objects(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.object_]:
    """Return arrays of several lengths as an array of arrays."""
    found = np.empty(len(arrays), object)
    for place, array in enumerate(arrays):
        found[place] = array
    return found


ASSUMED_FPS = 24.0  # what the processors write timestamps with when a clip does not tell its rate


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRule:
    """How many frames of a clip a model sees."""

    fps: float | None = 2.0  # frames per second of the clip's own time; None takes every frame
    min_frames: int = 4  # at least so many, if the clip has them
    max_frames: int | None = 768  # at most so many (rounded up to a temporal patch); None is no limit
    temporal_patch_size: int = 2  # the number of frames is a multiple of it
    keyframes: bool = False  # only keyframes are shown, of clips whose keyframes are known

    def __post_init__(self) -> None:
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
    keyframes: npt.ArrayLike = 0,
) -> Any:
    """Return how many frames are read, repeated ones included; numbers give an int, arrays an int64 array.

    `total` and `fps` are 0 where the file does not say; then `seconds` count. `picked` is how many frames the sample
    names itself; 0 lets the rule decide. `keyframes` is how many are known; 0: none.

    >>> count_frames(100, 25.0, FrameRule(fps=2.0))
    8
    """
    total_, fps_, seconds_, picked_, keyframes_ = np.broadcast_arrays(total, fps, seconds, picked, keyframes)
    frames = total_.astype(np.float64)
    rate = fps_.astype(np.float64)
    guess = np.where(rate > 0, np.floor(seconds_ * rate), 0.0)
    frames = np.where(frames > 0, frames, guess)
    wanted = _wanted(frames, rate, seconds_.astype(np.float64), rule)
    if rule.keyframes:
        wanted = np.where(keyframes_ > 0, np.minimum(wanted, keyframes_), wanted)
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
        # a clip of which neither frames nor rate are known: its duration is all there is to go by.
        wanted = np.where((total <= 0) & (seconds > 0), seconds * rule.fps, wanted)
    wanted = np.maximum(wanted, rule.min_frames)
    if rule.max_frames is not None:
        wanted = np.minimum(wanted, rule.max_frames)
    patch = rule.temporal_patch_size
    whole = np.ceil(np.floor(np.where(total > 0, np.minimum(wanted, total), wanted)) / patch) * patch
    return np.where(total > 0, np.minimum(whole, total), whole)


def frame_indices(
    total: int, fps: float, rule: FrameRule, picked: Sequence[int] | None = None, keyframes: Sequence[int] = ()
) -> npt.NDArray[np.int64]:
    """Return the numbers of the frames to read, in order; the last may repeat to fill a temporal patch.

    `picked` are frames that the sample names itself; those outside of the clip are moved to its ends. `keyframes` are
    those that are known.

    >>> frame_indices(3, 25.0, FrameRule()).tolist()
    [0, 1, 2, 2]
    """
    if total < 1:
        raise BadSampleError("decode", "no_frames", "The clip has no frame, so nothing can be sampled from it.")
    if picked is not None and len(picked):
        chosen = np.clip(np.asarray(picked, np.int64), 0, total - 1)
    else:
        number = int(_wanted(np.array([float(total)]), np.array([float(fps)]), np.zeros(1), rule)[0])
        if rule.keyframes and len(keyframes):
            places = np.asarray(keyframes, np.int64)
            chosen = places[_spread(len(places), min(number, len(places)))]
        else:
            chosen = _spread(total, number)
    missing = -len(chosen) % rule.temporal_patch_size
    return np.concatenate([chosen, np.repeat(chosen[-1:], missing)])


def _spread(total: int, number: int) -> npt.NDArray[np.int64]:
    """Return so many numbers below the total, evenly and with both ends."""
    spread: npt.NDArray[np.int64] = np.rint(np.linspace(0, total - 1, number)).astype(np.int64)
    return spread


def choose_keyframes(sizes: MediaSizes, rule: FrameRule) -> MediaSizes:
    """Return the sizes with those keyframes alone that the rule shows; none where it shows other frames."""

    def chosen(video: VideoSize) -> VideoSize:
        if not rule.keyframes or video.picked or not video.keyframes:
            return replace(video, keyframes=())
        shown = frame_indices(video.frames, video.fps, rule, None, video.keyframes)
        return replace(video, keyframes=tuple(np.unique(shown).tolist()))

    if not any(video.keyframes for video in sizes.videos):
        return sizes
    return replace(sizes, videos=tuple(map(chosen, sizes.videos)))


def count_keyframes(media: MediaColumns) -> npt.NDArray[np.int64]:
    """Return [videos] how many keyframes are known; 0: none."""
    if media.video_keyframes is None:
        return np.zeros(len(media.video_sizes), np.int64)
    numbers = (len(packed[:1]) + int(packed[2::2].sum(dtype=np.int64)) for packed in media.video_keyframes)
    return np.fromiter(numbers, np.int64, len(media.video_keyframes))


def count_shown(media: MediaColumns, rule: FrameRule) -> npt.NDArray[np.int64]:
    """Return [videos] how many frames are read of each."""
    shown: npt.NDArray[np.int64] = count_frames(
        media.video_sizes[:, 0],
        media.video_fps,
        rule,
        seconds=media.video_seconds,
        picked=media.video_picked,
        keyframes=count_keyframes(media) if rule.keyframes else 0,
    )
    return shown


def count_decoded(media: MediaColumns, rule: FrameRule) -> npt.NDArray[np.int64]:
    """Return [n] about how many thousand pixels a decoder goes through for each sample's videos.

    A picked frame needs half of its group of pictures, a keyframe itself alone; of videos whose groups are not known
    all frames count.
    """
    frames, height, width = media.video_sizes.T
    picked = count_shown(media, rule)
    gops = np.zeros(len(frames), np.int64) if media.video_gops is None else np.abs(media.video_gops)
    half = (frames / np.maximum(gops, 1) + 1) / 2
    if rule.keyframes:
        half = np.where((media.video_picked == 0) & (count_keyframes(media) > 0), 1.0, half)
    pixels = np.where(gops > 0, np.minimum(frames, picked * half), frames) * height * width
    ends = np.concatenate([[0.0], np.cumsum(np.rint(pixels / 1000))])
    decoded: npt.NDArray[np.int64] = np.diff(ends[media.video_splits]).astype(np.int64)
    return decoded


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


def sample_clip(size: VideoSize, rule: FrameRule) -> dict[str, Any]:
    """Return the metadata of a clip whose frames are picked by a rule."""
    total = size.frames if size.frames > 0 else int(size.seconds * size.fps)
    indices = frame_indices(max(total, 1), size.fps, rule, size.picked or None, size.keyframes)
    return make_video_metadata(total, size.fps, size.seconds, indices)
