"""`Geometry`: how one processor turns media sizes into tokens. A frozen value that travels as JSON and has a digest.

Enters a processor (an object; transformers is never imported here) or JSON; leaves rules for images, videos, audio and
the sampling of frames. It knows nothing of text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.tokens.frames import FrameRule
from vlm_stream.tokens.rules.audio import ChunkedAudio, ConvolvedMel, FilterBank, SubsampledMel, WindowedMel
from vlm_stream.tokens.rules.base import UnknownMedium
from vlm_stream.tokens.rules.budgets import BudgetedImage, NavitImage, NavitVideo, SoftBudget, TargetedVideo
from vlm_stream.tokens.rules.grids import ClipGrid, ClipGridImage, FrameGrid, PatchGrid
from vlm_stream.tokens.rules.pieces import (
    AnyresImage,
    FixedFrames,
    FixedImage,
    PaddedTiles,
    RowCrops,
    TileGrid,
    WindowCrops,
)

if TYPE_CHECKING:
    from vlm_stream.tokens.families import Processor
    from vlm_stream.tokens.rules.base import AudioRule, ImageRule, VideoRule

__all__ = ["Geometry"]

_VERSION = 1
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_RULES: Final[dict[str, type[Any]]] = {
    rule.__name__: rule
    for rule in (
        *(AnyresImage, BudgetedImage, ChunkedAudio, ClipGrid, ClipGridImage, ConvolvedMel, FilterBank),
        *(FixedFrames, FixedImage, FrameGrid, NavitImage, NavitVideo, PaddedTiles, PatchGrid, RowCrops),
        *(SoftBudget, SubsampledMel, TargetedVideo, TileGrid, UnknownMedium, WindowCrops, WindowedMel),
    )
}
"""Rules by name: how they travel as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The counting rules of one processor.

    Example:
        >>> Geometry.unknown().is_exact
        False
    """

    family: str
    """Name of the processor's family, as transformers names its folders; "unknown" for the guess."""
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
            The geometry; `is_exact` is False for a family that is not known here (500 tokens for each medium).
        """
        from vlm_stream.tokens.families import read_geometry

        geometry = read_geometry(processor)
        return geometry if frames is None else replace(geometry, frames=frames)

    @classmethod
    def unknown(cls) -> Geometry:
        """Return the guess: 500 tokens for each medium."""
        guess = UnknownMedium()
        return cls(family="unknown", image=guess, video=guess, audio=guess, is_exact=False)

    def to_json(self) -> dict[str, Any]:
        """Return the geometry as JSON data."""
        return {
            "version": _VERSION,
            "family": self.family,
            "image": _rule_to_json(self.image),
            "video": _rule_to_json(self.video),
            "audio": _rule_to_json(self.audio),
            "frames": asdict(self.frames),
            "is_exact": self.is_exact,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Geometry:
        """Read what `to_json` has written."""
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

    def digest(self) -> str:
        """Return a short name of everything that decides counts; equal geometries have equal digests."""
        return hashlib.sha256(_ENCODER.encode(self.to_json()).encode()).hexdigest()[:16]


def _rule_to_json(rule: Any) -> dict[str, Any] | None:
    """Return the name and the numbers of a rule."""
    if rule is None:
        return None
    return {"rule": type(rule).__name__} | asdict(rule)


def _rule_from_json(value: dict[str, Any] | None) -> Any:
    """Build the rule that `_rule_to_json` has written."""
    if value is None:
        return None
    options = dict(value)
    name = str(options.pop("rule", ""))
    if name not in _RULES:
        raise ConfigError(
            f"The counting rule {name!r} is not known to this version, so its tokens cannot be counted: "
            f"{nearest_name(name, _RULES)}"
        )
    known = {field.name for field in fields(_RULES[name])}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"The counting rule {name} has no field {unknown[0]!r} in this version, so its tokens cannot be counted: "
            f"{nearest_name(unknown[0], known)}"
        )
    return _RULES[name](**{key: _freeze(option) for key, option in options.items()})


def _freeze(value: Any) -> Any:
    """Turn JSON's lists into the tuples that frozen rules hold."""
    return tuple(_freeze(part) for part in value) if isinstance(value, list) else value
