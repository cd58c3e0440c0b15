"""`Geometry`: how one processor turns media sizes into tokens; and counting by it, and what it refuses.

A geometry is a frozen value that travels as JSON and has a digest. Enters a processor (an object; transformers is never
imported here) or JSON; leaves rules for images, videos, audio and the sampling of frames. With it, index columns become
lengths:

    tokens = text_tokens + tokens of all media - number of media

because `text_tokens` holds one token for every medium (see `text.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import BadSampleError, ConfigError, nearest_name
from vlm_stream.keys import FAKE_IMAGE_SIZE
from vlm_stream.tokens.chat import Processor
from vlm_stream.tokens.measure import COMMON_RULES, Measured
from vlm_stream.tokens.media import FrameRule, ImageSize, MediaColumns, MediaSizes, VideoSize, count_shown
from vlm_stream.tokens.rules import (
    AudioRule,
    Floats,
    ImageRule,
    Ints,
    MediaCounts,
    VideoRule,
    audio,
    budgets,
    grids,
    pieces,
)

_VERSION = 1
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_RULES: Final[dict[str, type[Any]]] = {
    name: kind
    for module in (audio, budgets, grids, pieces)
    for name, kind in {"Measured": Measured, **vars(module)}.items()
    if isinstance(kind, type) and is_dataclass(kind) and kind is not MediaCounts and not name.startswith("_")
}
"""Rules by name: how they travel as JSON."""


_WAY_OUT: Final = "A dataset of another version is counted again with: vlm-stream recount --processor ..."
_ONE_TOKEN: Final = (
    budgets.BudgetedImage,
    budgets.Navit,
    budgets.SoftBudget,
    grids.ClipGrid,
    grids.PatchGrid,
    pieces.AnyresImage,
    pieces.TileGrid,
)


class Resized(NamedTuple):
    """A picture as the vision tower gets it: a grid of patches, some of which become one token together."""

    height: int
    width: int
    patch_size: int
    merge_size: int
    """Patches along the square that becomes one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The counting rules of one processor.

    Example:
        >>> Geometry.unknown().is_exact
        False
    """

    family: str
    """Name of the processor's family, as transformers names its folders; its class where it is measured; "unknown"
    for estimates without a processor."""
    image: ImageRule | None = None
    """Rule for images; None: the processor reads none."""
    video: VideoRule | None = None
    """Rule for videos; None: the processor reads none."""
    audio: AudioRule | None = None
    """Rule for sound; None: the processor reads none."""
    frames: FrameRule = field(default_factory=FrameRule)
    """Which frames of a video are read."""
    is_exact: bool = True
    """Whether counts equal the length of `input_ids`; otherwise they are estimates."""

    @classmethod
    def from_processor(cls, processor: Processor, *, frames: FrameRule | None = None) -> Geometry:
        """Read the rules of a processor, as the installed transformers applies them.

        Args:
            processor: A transformers processor; a bare tokenizer counts as one that reads no media.
            frames: Which frames are read, if not those that the processor's own config names.

        Returns:
            The geometry. A family that no rule is written for is measured: its processor is asked, with blank media,
            once for each size (`is_measured`). One that cannot be asked is estimated (`is_exact` is False).
        """
        from vlm_stream.tokens.families import read_geometry

        geometry = read_geometry(processor)
        return geometry if frames is None else replace(geometry, frames=frames)

    @classmethod
    def unknown(cls) -> Geometry:
        """Return estimates where no processor is known: the rules of the most common families."""
        return cls(family="unknown", **COMMON_RULES, is_exact=False)

    @property
    def is_measured(self) -> bool:
        """Whether counts are what the processor itself answers."""
        return any(isinstance(rule, Measured) for rule in self.rules().values())

    def rules(self) -> dict[str, Any]:
        """Return the rule of each medium, None for those that are not read."""
        return {"image": self.image, "video": self.video, "audio": self.audio}

    def remember_in(self, folders: Iterable[Path]) -> None:
        """Keep what is measured in the first of these folders that can be written to; read it from all of them."""
        places = list(folders)
        for rule in {rule for rule in self.rules().values() if isinstance(rule, Measured)}:
            rule.remember_in(places)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "family": self.family,
            **{medium: _rule_to_json(rule) for medium, rule in self.rules().items()},
            # Without what few runs ask for: the digests of all others stay as they were.
            "frames": {name: told for name, told in asdict(self.frames).items() if name != "keyframes" or told},
            "is_exact": self.is_exact,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Geometry:
        if value.get("version") != _VERSION:
            raise ConfigError(
                f"This geometry has version {value.get('version')!r} and this package reads version {_VERSION}: "
                "make it again from the processor."
            )
        options = {key: option for key, option in value.items() if key != "version"}
        unknown = sorted(set(options) - set(cls.__dataclass_fields__))
        if unknown:
            raise ConfigError(
                f"A geometry has no field {unknown[0]!r}: {nearest_name(unknown[0], cls.__dataclass_fields__)}"
            )
        rules = {medium: _rule_from_json(options[medium]) for medium in ("image", "video", "audio")}
        return cls(
            family=options["family"], frames=FrameRule(**options["frames"]), is_exact=options["is_exact"], **rules
        )

    def resize(self, height: int, width: int, frames: int | None = None) -> Resized | None:
        """Return what an image, or each of so many sampled frames, is resized to; None: not a grid of equal squares."""
        rule: Any = self.image if frames is None else self.video
        sides = [np.asarray([side], np.int64) for side in (height, width)]
        if frames is None:
            grid = rule.grid_images(*sides) if hasattr(rule, "grid_images") else None
        else:
            grid = rule.grid_videos(np.asarray([frames], np.int64), *sides) if hasattr(rule, "grid_videos") else None
        if grid is None:
            return None
        _, rows, columns = grid[0].tolist()
        return Resized(rows * rule.patch_size, columns * rule.patch_size, rule.patch_size, rule.merge_size)

    def digest(self) -> str:
        """Return a short name of everything that decides counts; equal geometries have equal digests."""
        return hashlib.sha256(_ENCODER.encode(self.to_json()).encode()).hexdigest()[:16]


def repeats_one_token(rule: ImageRule | None) -> bool:
    """Tell whether an image is one token again and again, so that one of them and their number say all of it.

    Others write rows, line ends or crops between, which depend on the size.
    """
    return isinstance(rule, _ONE_TOKEN)


def _rule_to_json(rule: Any) -> dict[str, Any] | None:
    if rule is None:
        return None
    return {"rule": type(rule).__name__} | asdict(rule)


def _rule_from_json(value: dict[str, Any] | None) -> Any:
    if value is None:
        return None
    options = dict(value)
    name = str(options.pop("rule", ""))
    if name not in _RULES:
        raise ConfigError(
            f"The counting rule {name!r} is not known to this version, so its tokens cannot be counted: "
            f"{nearest_name(name, _RULES)} {_WAY_OUT}"
        )
    known = {field.name for field in fields(_RULES[name])}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"The counting rule {name} has no field {unknown[0]!r} in this version, so its tokens cannot be counted: "
            f"{nearest_name(unknown[0], known)} {_WAY_OUT}"
        )
    return _RULES[name](**{key: _freeze(option) for key, option in options.items()})


def _freeze(value: Any) -> Any:
    """Turn JSON's lists into the tuples that frozen rules hold."""
    return tuple(_freeze(part) for part in value) if isinstance(value, list) else value


def check_media_sizes(sizes: MediaSizes, geometry: Geometry) -> None:
    """Raise `BadSampleError` if the processor would refuse one of a sample's media.

    Without a known processor the common limits hold: no empty media, no sides further apart than 200 to 1. The reasons
    are "empty_medium", "extreme_shape" and "unsupported_medium".
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns:
    """What n samples cost a model, by the geometry of its processor."""

    tokens: npt.NDArray[np.int64]
    """[n] Length of `input_ids`: `text_tokens`, plus the embeddings of all media, minus the number of media."""
    vision_tokens: npt.NDArray[np.int64]
    """[n] How many of them are embeddings of images and videos."""
    vision_patches: npt.NDArray[np.int64]
    """[n] Patches that enter the vision tower."""
    vision_squares: npt.NDArray[np.float64]
    """[n] Sum over images and frames of patches squared: what full attention in the vision tower costs."""


def count_tokens(columns: MediaColumns, geometry: Geometry) -> TokenColumns:
    num_rows = len(columns.text_tokens)
    tokens = columns.text_tokens.astype(np.int64)
    vision, patches = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    squares = np.zeros(num_rows, np.float64)
    for count, splits in (
        (_count_images, columns.image_splits),
        (_count_videos, columns.video_splits),
        (_count_audios, columns.audio_splits),
    ):
        if not splits[-1]:  # most data lacks at least one of them
            continue
        counts = count(columns, geometry)
        embeddings = _sum_rows(counts.tokens, splits)
        tokens = tokens + embeddings - np.diff(splits)
        if count is not _count_audios:
            vision = vision + embeddings
            patches = patches + _sum_rows(counts.patches, splits)
            squares = squares + _sum_floats(counts.squares, splits)
    return TokenColumns(tokens=tokens, vision_tokens=vision, vision_patches=patches, vision_squares=squares)


def count_image_tokens(heights: Sequence[int], widths: Sequence[int], geometry: Geometry) -> list[int]:
    """Return the embeddings of each image of one sample."""
    rule = _rule(geometry, "image")
    siblings = np.full(len(heights), len(heights), np.int64)
    counts: MediaCounts = rule.count_images(np.asarray(heights, np.int64), np.asarray(widths, np.int64), siblings)
    return [int(number) for number in counts.tokens]


def fake_image_tokens(geometry: Geometry) -> int:
    """Return the embeddings of the fake image; the text around it is counted with the text.

    >>> fake_image_tokens(Geometry.unknown())
    4
    """
    height, width = FAKE_IMAGE_SIZE
    return count_image_tokens([height], [width], geometry)[0]


def _rule(geometry: Geometry, medium: str) -> Any:
    """Return how a medium is counted, also one that the processor does not read: `check_media_sizes` refuses that."""
    return geometry.rules()[medium] or COMMON_RULES[medium]


def _count_images(columns: MediaColumns, geometry: Geometry) -> MediaCounts:
    per_row = np.diff(columns.image_splits)
    siblings = np.repeat(per_row, per_row)  # [images]
    heights, widths = columns.image_sizes.T
    rule = _rule(geometry, "image")
    counts: MediaCounts = rule.count_images(heights, widths, siblings)
    return counts


def _count_videos(columns: MediaColumns, geometry: Geometry) -> MediaCounts:
    _, heights, widths = columns.video_sizes.T
    frames = count_shown(columns, geometry.frames)
    rule = _rule(geometry, "video")
    counts: MediaCounts = rule.count_videos(frames, heights, widths)
    return counts


def _count_audios(columns: MediaColumns, geometry: Geometry) -> MediaCounts:
    rule = _rule(geometry, "audio")
    samples, rates = columns.audio_sizes.T
    samples = audio.resample_length(samples, rates, rule.sampling_rate)
    per_row = np.diff(columns.audio_splits)
    longest = np.zeros(len(per_row), np.int64)
    np.maximum.at(longest, np.repeat(np.arange(len(per_row)), per_row), samples)
    counts: MediaCounts = rule.count_audios(samples, np.repeat(longest, per_row))
    return counts


def _sum_rows(values: Ints, splits: Ints) -> Ints:
    """Sum ragged rows exactly; empty rows give 0 (`np.add.reduceat` would not)."""
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    rows: Ints = sums[splits[1:]] - sums[splits[:-1]]
    return rows


def _sum_floats(values: Floats, splits: Ints) -> Floats:
    """Sum ragged rows of floats, each row by itself so that large neighbours cost no digits."""
    per_row = np.diff(splits)
    rows = np.repeat(np.arange(len(per_row)), per_row)
    return np.bincount(rows, weights=values, minlength=len(per_row)).astype(np.float64, copy=False)
