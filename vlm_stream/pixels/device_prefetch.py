"""`DeviceFeed`: batches finished on the trainer's device, while the trainer works on the one before.

Enters: batches as they come from the workers. Leaves: finished batches. On CUDA a batch is pinned, copied and finished
on a stream of its own; the trainer's stream waits for it only when it takes the batch. Elsewhere there is nothing to
overlap, and a batch is finished when it is taken.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from vlm_stream.errors import ConfigError
from vlm_stream.pixels.finish import DEFAULT_DTYPE, FinishedOnRead, finish_pixels

Item = TypeVar("Item")


class DeviceFeed:
    """Moves batches to one device and finishes their pixels there."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype | str = DEFAULT_DTYPE) -> None:
        """Take where batches go and the dtype of their pixels, by name (`"bfloat16"`) or as torch's own."""
        self.device = torch.device(device)
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


def _each_tensor(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return the batch with each tensor replaced by what the function makes of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, FinishedOnRead):
        return _each_tensor(value.chunks, function)
    if isinstance(value, Mapping):
        return {key: _each_tensor(one, function) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_tensor(one, function) for one in value]
    return value
