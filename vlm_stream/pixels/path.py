"""`CompactPath`: a processor that gives compact pixels, or the reason why there is none.

Enters: a processor. Leaves: a copy with the same text part, whose image and video parts stop early. Ids and grids come
from the processor's own code, and so does every parameter. Whether finished pixels equal the processor's is tried on a
few small media first, so a step that is not known here refuses the path.
"""

from __future__ import annotations

import copy
import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from vlm_stream.errors import ConfigError
from vlm_stream.keys import PIXEL_KEYS, PIXEL_SPEC_KEY
from vlm_stream.pixels.finish import finish_tensor
from vlm_stream.pixels.spec import PartSpec, PixelSpec
from vlm_stream.pixels.uint8_processor import CROP_PARTS, PATCHIFIED_PARTS, Undone, make_uint8_part
from vlm_stream.tokens import read_family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlm_stream.pixels.uint8_processor import Uint8Part
    from vlm_stream.tokens import Processor

__all__ = ["COMPACT_FAMILIES", "CompactPath", "find_compact_path"]

logger = logging.getLogger(__name__)

COMPACT_FAMILIES: Final[dict[str, Mapping[str, type[Uint8Part]]]] = {
    "gemma3": CROP_PARTS,
    "glm46v": PATCHIFIED_PARTS,
    "internvl": CROP_PARTS,
    "qwen2_5_vl": PATCHIFIED_PARTS,
    "qwen2_vl": PATCHIFIED_PARTS,
    "qwen3_omni_moe": PATCHIFIED_PARTS,
    "qwen3_vl": PATCHIFIED_PARTS,
}
"""Families whose finished pixels were proven equal to the processor's -> the parts that they may have."""

_TOLERANCE: Final = 1e-6
_PART_NAMES: Final = ("image_processor", "video_processor")
_KNOWN_STEPS: Final = frozenset(
    {"do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames", "do_pan_and_scan"}
)


class CompactPath:
    """A processor's uint8 copy, and what finishes its pixels."""

    def __init__(self, processor: Processor) -> None:
        """Make the copy; raise `ConfigError` with the reason if the processor has none."""
        family = read_family(processor)
        if family not in COMPACT_FAMILIES:
            known = ", ".join(COMPACT_FAMILIES)
            raise ConfigError(f"{type(processor).__name__} has no compact path (families that have one: {known})")
        self._original = processor
        self._undone: dict[str, Undone] = {}
        self.processor: Any = copy.copy(processor)
        """Called instead of the original: the same ids and grids, pixels as bytes."""
        for name in _PART_NAMES:
            part = getattr(processor, name, None)
            if part is None:
                continue
            mixin = COMPACT_FAMILIES[family].get(type(part).__name__)
            reason = "its class is not known" if mixin is None else _find_unknown_step(part)
            if mixin is None or reason:
                raise ConfigError(f"{type(part).__name__} of {type(processor).__name__} has no compact path: {reason}")
            self._undone[name] = Undone()
            compact = make_uint8_part(part, mixin, self._undone[name])
            _try_out(part, compact, self._undone[name], name)
            setattr(self.processor, name, compact)
        self.spec  # noqa: B018 - raises where two parts cannot share a key

    @staticmethod
    def for_processor(processor: Processor) -> tuple[CompactPath | None, str]:
        """Return the path of a processor and "", or None and the reason why there is none."""
        # Trying a path out is slow, and some callers ask once per batch.
        key: Any = processor  # compared as an object
        return _find_path(key, *(getattr(processor, name, None) for name in (*_PART_NAMES, "tokenizer")))

    def __reduce__(self) -> tuple[Any, ...]:
        return CompactPath, (self._original,)

    @property
    def spec(self) -> PixelSpec:
        """What the last calls left undone."""
        parts: dict[str, PartSpec] = {}
        for name, undone in self._undone.items():
            key = _key_of(self.processor, name)
            if undone.spec is not None and parts.setdefault(key, undone.spec) != undone.spec:
                raise ConfigError(
                    f"{type(self.processor).__name__} has no compact path: it normalises images and videos differently "
                    f"and gives both as '{key}'"
                )
        return PixelSpec(parts=tuple(sorted(parts.items())))

    def tag(self, batch: Mapping[str, Any]) -> dict[str, str]:
        """Return the entry that a batch of the copy must carry; none where it has no pixels."""
        spec = self.spec
        parts = tuple((key, part) for key, part in spec.parts if batch.get(key) is not None)
        return {PIXEL_SPEC_KEY: PixelSpec(parts=parts).dump()} if parts else {}


def find_compact_path(processor: Processor) -> CompactPath | None:
    """Return the path; None, and a line in the log for the first processor of its kind, where there is none."""
    path, reason = CompactPath.for_processor(processor)
    if path is None:
        _say_once(reason)
    return path


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    logger.warning("Pixels stay full, as the processor gives them: %s.", reason)


@lru_cache(maxsize=8)
def _find_path(processor: Processor, *parts: Any) -> tuple[CompactPath | None, str]:  # noqa: ARG001
    """Find the path of a processor; `parts` make sure that one whose parts were replaced is looked at again."""
    try:
        return CompactPath(processor), ""
    except ConfigError as error:
        return None, str(error)


def _key_of(processor: Processor, part_name: str) -> str:
    """Return the key under which a part's pixels come out; InternVL gives frames as images."""
    images_only = read_family(processor) == "internvl"
    return PIXEL_KEYS[0] if part_name == "image_processor" or images_only else PIXEL_KEYS[1]


def _find_unknown_step(part: Any) -> str:
    if getattr(part, "backend", None) != "torchvision":
        return f"it does not resize with torchvision but with {getattr(part, 'backend', 'something else')}"
    steps = {name for name in dir(part) if name.startswith("do_") and getattr(part, name) is True}
    unknown = sorted(steps - _KNOWN_STEPS)
    if unknown:
        return f"it has steps that cannot be put off ({', '.join(unknown)})"
    if not (getattr(part, "do_rescale", False) or getattr(part, "do_normalize", False)):
        return "it neither rescales nor normalises, so there is nothing to put off"
    return ""


def _try_out(part: Any, uint8_part: Any, undone: Undone, name: str) -> None:
    """Refuse a uint8 part whose finished pixels are not the original's."""
    if name == "image_processor":
        arguments: dict[str, Any] = {"images": _trial_images()}
    else:
        arguments = {"videos": [_trial_pixels(4, 40, 72)], "do_sample_frames": False}
    try:
        full = dict(part(**arguments, return_tensors="pt"))
        compact = dict(uint8_part(**arguments, return_tensors="pt"))
        key = next(key for key in PIXEL_KEYS if key in full)
        spec = undone.spec
        is_same = spec is not None and compact[key].dtype == torch.uint8 and full[key].is_floating_point()
        if is_same and spec is not None:
            finished = finish_tensor(compact[key], spec, torch.float32)
            is_same = finished.shape == full[key].shape and bool((finished - full[key]).abs().max() <= _TOLERANCE)
    except Exception as error:  # a step that does not take bytes may fail in any way
        raise ConfigError(f"{type(part).__name__} has no compact path: trying it failed ({error!r})") from error
    if not is_same:
        raise ConfigError(
            f"{type(part).__name__} has no compact path: it has a step that is not known here, its pixels differ from "
            "the finished ones"
        )


def _trial_pixels(num_frames: int, height: int, width: int) -> Any:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def _trial_images() -> list[Any]:
    from PIL import Image

    return [Image.fromarray(_trial_pixels(1, height, width)[0]) for height, width in ((37, 90), (128, 61))]
