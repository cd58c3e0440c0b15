"""What a batch says of its compact pixels: enough to finish them without the processor.

A spec travels in batches as a string under `PIXEL_SPEC_KEY`: queues, pinning, `torch.save` and trainers leave strings
alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from vlm_stream.errors import ConfigError
from vlm_stream.keys import PIXEL_KEYS, PIXEL_SPEC_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["PartSpec", "PixelSpec", "carry_spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """How one key's pixels are finished: `(value - mean) / std` for each channel, then `repeat` copies in time."""

    layout: Literal["patches", "planes"]
    """`patches`: rows [channels * pixels], a patch each; `planes`: [..., channels, height, width]."""
    repeat: int
    """Copies of each channel's pixels in a row: the temporal patch of still images."""
    mean: tuple[float, ...]
    """For each channel, in units of the stored bytes."""
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSpec:
    """The specs of all pixel keys."""

    parts: tuple[tuple[str, PartSpec], ...]
    """(key, spec), sorted by key."""

    def part(self, key: str) -> PartSpec | None:
        """Return the spec of a key."""
        return dict(self.parts).get(key)

    def dump(self) -> str:
        """Return the spec as a string; numbers come back exactly."""
        return json.dumps({key: asdict(part) for key, part in self.parts})

    @staticmethod
    def load(text: str) -> PixelSpec:
        """Return the spec that `dump` wrote."""
        return _load(text)


@lru_cache(maxsize=16)
def _load(text: str) -> PixelSpec:
    parts = json.loads(text)
    return PixelSpec(
        parts=tuple(
            (key, PartSpec(**(fields | {"mean": tuple(fields["mean"]), "std": tuple(fields["std"])})))
            for key, fields in sorted(parts.items())
        )
    )


def carry_spec(samples: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return `{PIXEL_SPEC_KEY: ...}` for a batch of these samples (or packs); empty where no pixels are compact.

    Raises:
        ConfigError: Some pixels are compact and others are not, or they are to be finished differently.
    """
    with_pixels = [sample for sample in samples if any(sample.get(name) is not None for name in PIXEL_KEYS)]
    merged: dict[str, PartSpec] = {}
    for sample in with_pixels:
        text = sample.get(PIXEL_SPEC_KEY)
        parts = dict(PixelSpec.load(text).parts) if text is not None else {}
        if (text is None) != (with_pixels[0].get(PIXEL_SPEC_KEY) is None) or any(
            merged.get(key, part) != part for key, part in parts.items()
        ):
            raise ConfigError(
                "The samples of one batch hold pixels of different kinds (compact and full, or normalised in different "
                "ways), so joining them would mix bytes with finished values. Encode all of them with one processor "
                "and one value of pixels=."
            )
        merged |= parts
    return {PIXEL_SPEC_KEY: PixelSpec(parts=tuple(sorted(merged.items()))).dump()} if merged else {}
