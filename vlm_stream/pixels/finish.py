"""`finish_pixels`: a batch with compact pixels becomes the batch that the processor itself would have led to.

Enters: a batch of any collation, padded, packed or with its media cut for a pipeline. Leaves: the same batch with
pixels rescaled, normalised, and copied in time where the family does that; on the given device, in the given dtype.
Values are computed in float32 and in the order in which processors normalise, so that they are theirs within 1e-6.

What a batch says of its compact pixels (`PixelSpec`) is enough to finish them without the processor. It travels as a
string under `PIXEL_SPEC_KEY`: queues, pinning, `torch.save` and trainers leave strings alone.
"""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, Literal, TypeVar, overload

import torch

from vlm_stream.errors import ConfigError
from vlm_stream.keys import PIXEL_KEYS, PIXEL_SPEC_KEY

Item = TypeVar("Item")

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
        return _dump(self)

    @staticmethod
    def load(text: str) -> PixelSpec:
        """Return the spec that `dump` wrote."""
        return _load(text)


@lru_cache(maxsize=16)
def _dump(spec: PixelSpec) -> str:
    return json.dumps({key: asdict(part) for key, part in spec.parts})


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
    texts = {
        sample.get(PIXEL_SPEC_KEY) for sample in samples if any(sample.get(name) is not None for name in PIXEL_KEYS)
    }
    known = [text for text in texts if text is not None]
    if not known:
        return {}
    if len(texts) == 1:
        return {PIXEL_SPEC_KEY: known[0]}
    merged: dict[str, PartSpec] = {}
    for text in known:
        parts = dict(PixelSpec.load(text).parts)
        if None in texts or any(merged.get(key, part) != part for key, part in parts.items()):
            raise ConfigError(
                "The samples of one batch hold pixels of different kinds (compact and full, or normalised in different "
                "ways), so joining them would mix bytes with finished values. Encode all of them with one processor "
                "and one value of pixels=."
            )
        merged |= parts
    return {PIXEL_SPEC_KEY: PixelSpec(parts=tuple(sorted(merged.items()))).dump()}


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

    def with_chunks(self, chunks: Sequence[Any]) -> FinishedOnRead:
        """Return the same of other chunks."""
        return FinishedOnRead(chunks, self._key, self._dtype, self._spec)

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
    is_late = device.type == "cuda"  # elsewhere a copy that is not waited for may be read too early
    return _each_tensor(value, lambda tensor: tensor.to(device, non_blocking=is_late))


def _each_tensor(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return a value with each tensor replaced by what the function makes of it; what holds none stays what it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, FinishedOnRead):
        return value.with_chunks(_each_tensor(value.chunks, function))
    if isinstance(value, Mapping):
        return {key: _each_tensor(one, function) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        changed = [_each_tensor(one, function) for one in value]
        return value if all(map(operator.is_, changed, value)) else changed
    return value


class DeviceFeed:
    """Moves batches to one device and finishes their pixels there, while the trainer works on the one before.

    On CUDA a batch is pinned, copied and finished on a stream of its own; the trainer's stream waits for it only when
    it takes the batch. Elsewhere there is nothing to overlap, and a batch is finished when it is taken.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype | str = DEFAULT_DTYPE) -> None:
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ConfigError(
                f"device is {device!r}, which is no device of torch, so batches cannot be delivered there; write cpu, "
                f"cuda, cuda:1 or another of torch's names"
            ) from None
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ConfigError(
                f"dtype is {dtype!r}, which is no floating-point dtype of torch, so pixels cannot be finished in it; "
                "use 'bfloat16', 'float16' or 'float32'"
            )
        self.dtype = found
        self.depth = 1 if self.device.type == "cuda" else 0
        """Batches that are sent ahead of the one that the trainer takes."""
        self._stream: Any = None

    def batches(
        self, items: Iterable[Item], batch_of: Callable[[Item], Mapping[str, Any]]
    ) -> Iterator[tuple[Item, dict[str, Any]]]:
        """Yield each item with its finished batch, in order."""
        sent: deque[tuple[Item, dict[str, Any], Any]] = deque()
        for item in items:
            sent.append((item, *self._send(batch_of(item))))
            if len(sent) > self.depth:
                yield self._take(*sent.popleft())
        while sent:
            yield self._take(*sent.popleft())

    def _send(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        if self.device.type != "cuda":
            return finish_pixels(batch, self.device, self.dtype), None
        if self._stream is None:
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"device is {self.device}, and torch finds no GPU here, so batches cannot be delivered there; "
                    f"leave device out, or look at the driver, CUDA_VISIBLE_DEVICES and the build of torch"
                )
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        pinned = _each_tensor(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())
        with torch.cuda.stream(self._stream):
            finished = finish_pixels(pinned, self.device, self.dtype)
            return finished, self._stream.record_event()

    def _take(self, item: Item, batch: dict[str, Any], sent: Any) -> tuple[Item, dict[str, Any]]:
        if sent is not None:
            trainer = torch.cuda.current_stream(self.device)
            trainer.wait_event(sent)
            # The allocator must not hand this memory to the side stream again while the trainer's stream uses it.
            _each_tensor(batch, lambda tensor: tensor.record_stream(trainer) if tensor.is_cuda else None)
        return item, batch
