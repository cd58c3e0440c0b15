"""Rules by name: how they travel as JSON."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.tokens.rules.anyres import AnyresImage
from vlm_stream.tokens.rules.audio import ChunkedAudio, ConvolvedMel, FilterBank, SubsampledMel, WindowedMel
from vlm_stream.tokens.rules.crops import RowCrops, WindowCrops
from vlm_stream.tokens.rules.fixed import FixedFrames, FixedImage, UnknownMedium
from vlm_stream.tokens.rules.navit import NavitImage, NavitVideo
from vlm_stream.tokens.rules.patch_budget import BudgetedImage, TargetedVideo
from vlm_stream.tokens.rules.patch_grid import ClipGrid, ClipGridImage, FrameGrid, PatchGrid
from vlm_stream.tokens.rules.soft_budget import SoftBudget
from vlm_stream.tokens.rules.tiles import PaddedTiles, TileGrid

__all__ = ["rule_from_json", "rule_to_json"]

_RULES: Final[dict[str, type[Any]]] = {
    rule.__name__: rule
    for rule in (
        AnyresImage,
        BudgetedImage,
        ChunkedAudio,
        ClipGrid,
        ClipGridImage,
        ConvolvedMel,
        FilterBank,
        FixedFrames,
        FixedImage,
        FrameGrid,
        NavitImage,
        NavitVideo,
        PaddedTiles,
        PatchGrid,
        RowCrops,
        SoftBudget,
        SubsampledMel,
        TargetedVideo,
        TileGrid,
        UnknownMedium,
        WindowCrops,
        WindowedMel,
    )
}


def rule_to_json(rule: Any) -> dict[str, Any] | None:
    """Return the name and the numbers of a rule."""
    if rule is None:
        return None
    return {"rule": type(rule).__name__} | {name: getattr(rule, name) for name in rule.__dataclass_fields__}


def rule_from_json(value: dict[str, Any] | None) -> Any:
    """Build the rule that `rule_to_json` has written."""
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
