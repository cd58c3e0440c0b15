"""`finish_pixels`: a batch with compact pixels becomes the batch that the processor itself would have led to.

Enters: a batch of any collation, padded, packed or with its media cut for a pipeline. Leaves: the same batch with
pixels rescaled, normalised, and copied in time where the family does that; on the given device, in the given dtype.
Values are computed in float32 and in the order in which processors normalise, so that they are theirs within 1e-6.

What a batch says of its compact pixels (`PixelSpec`) is enough to finish them without the processor. It travels as a
string under `PIXEL_SPEC_KEY`: queues, pinning, `torch.save` and trainers leave strings alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, Literal, overload

import torch

from vlm_stream.errors import ConfigError
from vlm_stream.keys import PIXEL_KEYS, PIXEL_SPEC_KEY

DEFAULT_DTYPE: Final = torch.bfloat16
_ROWS_IN_CACHE: Final = 512


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


def finish_pixels(
    batch: Mapping[str, Any],
    device: torch.device | str | None = None,
    dtype: torch.dtype = DEFAULT_DTYPE,
    spec: PixelSpec | str | None = None,
) -> dict[str, Any]:
    """Return the batch with finished pixels, ready for `model(**batch)`.

    Args:
        batch: What a collation made of samples that were encoded with `pixels="compact"`. It is not changed. A batch
            with full pixels is moved and converted like any other, so that a trainer need not know.
        device: Where all tensors of the batch go first; None: each stays where it is.
        dtype: Of the pixels.
        spec: For batches of collations that did not hand on `PIXEL_SPEC_KEY`.

    Returns:
        The batch without `PIXEL_SPEC_KEY`. Media cut for a pipeline are moved at once and finished one micro-batch at a
        time, when they are read.

    Raises:
        ConfigError: There are compact pixels, and nothing says how to finish them.
    """
    carried = batch.get(PIXEL_SPEC_KEY, spec)
    found = PixelSpec.load(carried) if isinstance(carried, str) else carried
    target = None if device is None else torch.device(device)
    out: dict[str, Any] = {}
    for key, value in batch.items():
        if key == PIXEL_SPEC_KEY:
            continue
        if isinstance(value, Mapping) and any(name in value for name in PIXEL_KEYS):
            out[key] = _finish_chunks(value, target, dtype, found)
        elif key in PIXEL_KEYS and value is not None:
            out[key] = _finish_value(key, _move(value, target), dtype, found)
        else:
            out[key] = _move(value, target)
    return out


class FinishedOnRead(Sequence[Any]):
    """The pixels of several micro-batches, kept compact until one of them is read."""

    def __init__(self, chunks: Sequence[Any], key: str, dtype: torch.dtype, spec: PixelSpec | None) -> None:
        self.chunks = chunks
        """Still compact."""
        self._key = key
        self._dtype = dtype
        self._spec = spec

    def __len__(self) -> int:
        return len(self.chunks)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return _finish_value(self._key, self.chunks[index], self._dtype, self._spec)


def finish_tensor(pixels: torch.Tensor, part: PartSpec, dtype: torch.dtype) -> torch.Tensor:
    """Finish bytes where they are: rows [n, channels * k], or planes [..., channels, height, width]."""
    mean, std = _constants(part, pixels.device)
    if part.layout == "planes":
        return pixels.to(torch.float32).sub_(mean).div_(std).to(dtype)
    num_rows, width = pixels.shape
    channels = len(part.mean)
    values = pixels.view(num_rows, channels, 1, width // channels)
    out = torch.empty((num_rows, channels, part.repeat, width // channels), dtype=dtype, device=pixels.device)
    # A portion at a time stays in a processor's cache; other devices would only be asked more often.
    portion = _ROWS_IN_CACHE if pixels.device.type == "cpu" else max(num_rows, 1)
    for begin in range(0, num_rows, portion):
        rows = slice(begin, begin + portion)
        out[rows] = values[rows].to(torch.float32).sub_(mean).div_(std)
    return out.view(num_rows, width * part.repeat)


@lru_cache(maxsize=64)
def _constants(part: PartSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and std [channels, 1, 1]; kept, because sending them to a device makes the host wait for it."""
    mean = torch.tensor(part.mean, dtype=torch.float32, device=device)[:, None, None]
    return mean, torch.tensor(part.std, dtype=torch.float32, device=device)[:, None, None]


def _finish_chunks(
    chunks: Mapping[str, Any], device: torch.device | None, dtype: torch.dtype, spec: PixelSpec | None
) -> dict[str, Any]:
    """Finish media that were cut for a pipeline: lists with an entry for each micro-batch."""
    carried = chunks.get(PIXEL_SPEC_KEY)
    spec = PixelSpec.load(carried) if carried is not None else spec
    moved = {key: _move(value, device) for key, value in chunks.items() if key != PIXEL_SPEC_KEY}
    return {
        key: FinishedOnRead(value, key, dtype, spec)
        if key in PIXEL_KEYS and not isinstance(value, FinishedOnRead)
        else value
        for key, value in moved.items()
    }


def _finish_value(key: str, value: Any, dtype: torch.dtype, spec: PixelSpec | None) -> Any:
    if isinstance(value, (list, tuple)):
        return [_finish_value(key, one, dtype, spec) for one in value]
    if value.is_floating_point():
        return value.to(dtype)
    part = None if spec is None else spec.part(key)
    if part is None:
        raise ConfigError(
            f"'{key}' holds bytes and the batch does not say how to finish them (it has no '{PIXEL_SPEC_KEY}'), so the "
            f"model would see unscaled pixels. Let the collation hand on '{PIXEL_SPEC_KEY}', or give spec=."
        )
    return finish_tensor(value, part, dtype)


def _move(value: Any, device: torch.device | None) -> Any:
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type == "cuda")  # elsewhere the copy may be read too early
    if isinstance(value, Mapping):
        return {key: _move(one, device) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and any(isinstance(one, (torch.Tensor, list, tuple)) for one in value):
        return [_move(one, device) for one in value]
    return value
