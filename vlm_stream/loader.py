"""`StreamLoader`: ready batches for a trainer, and the state of what the trainer has consumed.

It runs a `VLMStream` in worker processes and keeps, for each batch that it hands out, the cursor behind it. So the
state never counts what workers prefetched, and it is the same on every rank: a few kilobytes of JSON that fit any
number of ranks and workers.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import time
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.ledger import Ledger
from vlm_stream.metrics import Meter, resident_bytes, serve_prometheus
from vlm_stream.pixels.feed import DeviceFeed
from vlm_stream.pixels.finish import DEFAULT_DTYPE
from vlm_stream.stream import Position, StreamOptions, VLMStream
from vlm_stream.workers import WorkerOptions, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.stream import Delivery, Sources

__all__ = ["LOADER_ARGUMENTS", "StreamLoader"]

_KEY = "vlm_stream"


class StreamLoader:
    """Iterate over ready batches; save and load the position.

    >>> loader = StreamLoader("shards/", processor=processor, pack_size=4096, num_workers=2)  # doctest: +SKIP
    >>> for batch in loader:                                                                 # doctest: +SKIP
    ...     loss = model(**batch, use_cache=False).loss

    It follows the `Stateful` protocol of torch.distributed.checkpoint. Iterating again after the end delivers the next
    epoch. The other keyword arguments are the fields of `StreamOptions`.

    Args:
        sources: A path or URL, a list of them, or `{name: {"url": ..., "weight": ..., "sample_ratio": ...}}`.
        processor: A transformers processor, or the name or path of one. None: batches hold `RawSample`s, or what
            `collate_fn` makes of them.
        num_workers: Processes that read and encode; 0 does it in this one.
        prefetch_batches: Finished batches that each worker keeps ready.
        worker_timeout: Seconds after which a worker that finishes nothing is replaced; None: never.
        max_restarts: Workers that may be replaced before the run ends.
        start_method: How workers start: "fork", "spawn" or "forkserver"; None: the platform's default.
        rank: Data-parallel rank; by default the device mesh's, torch.distributed's, torchrun's, or 0.
        world_size: Number of data-parallel ranks, likewise.
        device_mesh: A `DeviceMesh`: model-parallel peers get the same data.
        device: Where batches are delivered, their pixels finished there: workers then send compact pixels if the
            processor's family has a path for them. On CUDA the next batch is copied while the trainer works on this
            one. None: batches stay on the CPU, as `pixels` says.
        dtype: Of the pixels of batches that are delivered to a device; bfloat16 by default.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        processor: Any,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        worker_timeout: float | None = None,
        max_restarts: int = 10,
        start_method: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: Any = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        """Keep the settings; nothing is opened before iteration starts."""
        if num_workers < 0 or prefetch_batches < 1:
            raise ConfigError(
                f"num_workers={num_workers} and prefetch_batches={prefetch_batches} make no batches; give 0 or more "
                f"workers and at least 1 batch to prefetch"
            )
        if dtype is not None and device is None:
            raise ConfigError(
                f"dtype={dtype} is that of pixels on a device, but no device is given, so nothing would be converted; "
                f"give device= as well, or call finish_pixels(batch, dtype=...) yourself"
            )
        self._feed = None if device is None else DeviceFeed(device, dtype or DEFAULT_DTYPE)
        if self._feed is not None:
            options = {"pixels": "compact"} | options
        self.stream = VLMStream(
            sources,
            processor=processor,
            options=StreamOptions.parse(options, others=LOADER_ARGUMENTS),
            rank=rank,
            world_size=world_size,
            device_mesh=device_mesh,
        )
        self._workers = WorkerOptions(
            num_workers=num_workers,
            prefetch=prefetch_batches,
            hang_s=worker_timeout,
            max_restarts=max_restarts,
            start_method=start_method,
        )
        self.ledger = Ledger(max_rate=self.stream.options.bad_budget)
        self._meter = Meter()
        self._pool: WorkerPool | None = None
        self._position = Position.at(None)
        self._taken = self._position
        """Behind what was taken from the workers: ahead of the other where batches are sent to a device early."""
        self._rounds = 0

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], **overrides: Any) -> StreamLoader:
        """Build a loader from a YAML recipe; keywords replace its values."""
        from vlm_stream.config import load_config

        return cls(**(load_config(path) | overrides))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches from the current position to the end of the epoch (or for ever)."""
        self.stream.epochs_before = self._rounds * (self.stream.options.epochs or 0)
        deliveries = self._deliveries()
        begin = time.monotonic()
        try:
            for delivery, batch in self._finished(deliveries):
                self._position = delivery.behind
                self._meter.add(delivery, time.monotonic() - begin)
                self.ledger.saw(delivery.num_samples)
                self.ledger.extend(delivery.bad)
                yield batch
                begin = time.monotonic()
        finally:
            deliveries.close()  # type: ignore[attr-defined]  # a generator: it ends the workers
            self._position = self._taken = self._position.written()
        self._rounds += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch handed out, as JSON values."""
        return {_KEY: copy.deepcopy(self._position.state()), "rounds": self._rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the batch after which `state_dict` was called, with any number of ranks and workers."""
        if not isinstance(state_dict, dict) or _KEY not in state_dict:
            raise StateError(
                f"this is not the state of a StreamLoader (it has no '{_KEY}' entry), so there is no position to go on "
                f"from; pass what loader.state_dict() returned, unwrapped from your checkpoint"
            )
        self._position = Position.at(json.loads(json.dumps(state_dict[_KEY])))
        self._rounds = int(state_dict.get("rounds", 0))

    def worker_pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return self._pool.pids() if self._pool is not None else []

    def metrics(self) -> dict[str, float]:
        """Return counts, rates and times per stage so far, for TensorBoard, W&B or a table."""
        return self._meter.numbers(pack_size=self.stream.options.pack_size) | {
            "ready_batches": self._pool.num_ready() if self._pool is not None else 0,
            "worker_restarts": self._pool.num_restarts if self._pool is not None else 0,
            "resident_megabytes": resident_bytes([os.getpid(), *self.worker_pids()]) / 1e6,
        }

    def serve_metrics(self, port: int, address: str = "127.0.0.1") -> Any:
        """Serve `metrics()` to Prometheus at `http://address:port/metrics`."""
        return serve_prometheus(self.metrics, port, address)

    def _finished(self, deliveries: Iterator[Delivery]) -> Iterator[tuple[Delivery, dict[str, Any]]]:
        if self._feed is None:
            return ((delivery, delivery.batch) for delivery in deliveries)
        return self._feed.batches(deliveries, lambda delivery: delivery.batch)

    def _deliveries(self) -> Iterator[Delivery]:
        if not self._workers.num_workers:
            yield from self.stream.deliveries(self._position.state())
            return
        self._taken = self._position
        self._pool = WorkerPool(self.stream.deliveries, self._position.state(), self._workers)
        try:
            for delivery in self._pool.items(lambda: self._taken.state()):
                self._taken = delivery.behind
                yield delivery
        finally:
            self._pool.close()


LOADER_ARGUMENTS: Final = tuple(
    name
    for name, parameter in inspect.signature(StreamLoader).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
)
"""What the loader takes itself; everything else is a field of `StreamOptions`."""
