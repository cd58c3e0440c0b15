"""`StreamLoader`: ready batches for a trainer, and the state of what the trainer was given.

It runs a `VLMStream` in worker processes and keeps, for each batch that it hands out, the cursor behind it. So the
state never counts what workers prefetched, and it is the same on every rank: a few kilobytes of JSON that fit any
number of ranks and workers.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import weakref
from collections import deque
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.iteration import Iteration
from vlm_stream.ledger import Ledger
from vlm_stream.metrics import Meter, resident_bytes, serve_prometheus
from vlm_stream.pixels import DEFAULT_DTYPE, DeviceFeed
from vlm_stream.stream import (
    LengthEstimate,
    Position,
    RunState,
    StreamOptions,
    UnknownLabels,
    VLMStream,
    count_rounds,
    estimate_length,
    is_endless,
    length_key,
    open_processor,
)
from vlm_stream.stream.consumers import refuse_bare_lightning
from vlm_stream.workers import WorkerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from vlm_stream.stream import Delivery, Sources, World
    from vlm_stream.workers import WorkerPool

__all__ = ["LOADER_ARGUMENTS", "StreamLoader"]

_KEPT_PLACES: Final = 64


class _Place(NamedTuple):
    """Where a loader stands."""

    position: Position
    rounds: int
    batches: int


class StreamLoader:
    """Iterate over ready batches; save and load the position.

    >>> loader = StreamLoader("shards/", processor=processor, pack_size=4096, num_workers=2)  # doctest: +SKIP
    >>> for batch in loader:                                                                 # doctest: +SKIP
    ...     loss = model(**batch, use_cache=False).loss

    It follows the `Stateful` protocol of torch.distributed.checkpoint. Iterating again after the end delivers the next
    epoch; with `train=False` every iteration delivers the same. The other keyword arguments are the fields of
    `StreamOptions`.

    Args:
        sources: A path or URL, a list of them, or `{name: {"url": ..., "weight": ..., "sample_ratio": ...}}`.
        processor: A transformers processor, or the name or path of one. None: batches hold `RawSample`s, or what
            `collate_fn` makes of them.
        num_workers: Processes that read and encode; 0 does it in this one.
        prefetch_batches: Finished batches that each worker keeps ready.
        worker_timeout: Seconds after which a worker that finishes nothing is replaced; None: never.
        max_restarts: Workers that may be replaced before the run ends; a sample that costs two of them (three, if they
            were killed by SIGKILL or SIGTERM) is left out, and they do not count.
        start_method: How workers start: "fork", "spawn" or "forkserver"; None: the platform's default.
        rank: Data-parallel rank. By default it is found when iteration starts: the device mesh's, torch.distributed's,
            Ray Train's, that of torchrun, MPI or SLURM, or 0 of 1.
        world_size: Number of data-parallel ranks, likewise.
        device_mesh: A `DeviceMesh`: model-parallel peers get the same data.
        device: Where batches are delivered, their pixels finished there: workers then send compact pixels if the
            processor's family has a path for them. On CUDA the next batch is copied while the trainer works on this
            one. None: batches stay on the CPU, as `pixels` says.
        dtype: Of the pixels of batches that are delivered to a device; bfloat16 by default.
        ledger_path: File to which a line of JSON is appended for each bad sample; where there are several ranks, each
            has its own (`ledger.rank3.jsonl`). None: the ledger is in memory alone.
        options: All `StreamOptions` as one value, instead of its fields as keywords.
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
        ledger_path: str | os.PathLike[str] | None = None,
        options: StreamOptions | None = None,
        **keywords: Any,
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
        if self._feed is not None and options is None:
            keywords = {"pixels": "compact"} | keywords
        self.stream = VLMStream(
            sources,
            processor=processor,
            options=StreamOptions.of(options, keywords, others=LOADER_ARGUMENTS),
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
        self._ledger_path = None if ledger_path is None else Path(ledger_path)
        self._meter = Meter()
        self._unknown_labels = UnknownLabels()
        self._place = _Place(Position.at(None), 0, 0)
        self._places: deque[_Place] = deque(maxlen=_KEPT_PLACES)
        """Where it stood before each of the latest batches."""
        self._length: tuple[str, int] | None = None
        self._running: weakref.ref[Iteration] | None = None
        self._num_restarts = 0
        """Of the workers of iterations that have ended."""

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], **overrides: Any) -> StreamLoader:
        """Build a loader from a YAML recipe; keywords replace its values."""
        from vlm_stream.config import load_config

        return cls(**(load_config(path) | overrides))

    @property
    def options(self) -> StreamOptions:
        """Return how samples become batches."""
        return self.stream.options

    @property
    def world(self) -> World:
        """Return the data-parallel rank that this process iterates with, or would if it began now."""
        running = self._iteration
        return self.stream.world if running is None else running.world

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches from the current position to the end of the epoch (or for ever).

        An iterator that is still open is closed: there is one position, and one iterator that moves it.
        """
        self.close()
        if not self.options.train:
            self._place = _Place(Position.at(None), 0, 0)
        else:
            refuse_bare_lightning(sys._getframe(1))
            if self._places and self._length is not None and self._length[1] == self._place.batches:
                self._round_ended()  # whoever counts batches takes the last one and does not ask for another
        world = self.stream.world
        if self._ledger_path is not None:
            own = f".rank{world.rank}" if world.size > 1 else ""
            self.ledger.path = self._ledger_path.with_name(self._ledger_path.stem + own + self._ledger_path.suffix)
        epochs_before = self._place.rounds * (self.options.epochs or 0)
        job = partial(self.stream.deliveries, world=world, epochs_before=epochs_before)
        iteration = Iteration(self, world, job, self._place.position, self._workers, self._feed)
        self._running = weakref.ref(iteration)
        return iteration

    def __getitem__(self, index: Any) -> Any:
        """Refuse to be taken for a dataset of samples."""
        raise ConfigError(
            f"a StreamLoader hands out ready batches in its own order and has no sample number {index!r}; iterate it, "
            f"or give it to a trainer as its data loader (vlm_stream.integrations, docs/trainers)"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Travel to another process without an iterator that is open here."""
        return self.__dict__ | {"_running": None}

    def end_round(self) -> None:
        """Go on to the next epoch now, if all batches of this one were handed out.

        For trainers that count batches and never ask for the one behind the last.
        """
        if self.options.train and not self.batches_left:
            self.close()
            self._round_ended()

    def close(self) -> None:
        """End the workers of an iterator that is still open; the position stays where it is."""
        running = self._iteration
        if running is not None:
            running.close("it was closed, or the loader was iterated again")

    def __enter__(self) -> StreamLoader:
        """Return the loader; leaving the `with` block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Return how many batches this iteration gives this rank, counted from its beginning.

        Batches that were handed out already count, so a resume does not change it. It is counted from the plan, once,
        and saved with the state; `estimate_len` is quicker.

        Raises:
            TypeError: There is no end.
        """
        if is_endless(self.options):
            raise TypeError("this loader has no end (epochs=None or stop='never'), so it has no length; count steps")
        key = length_key(self.stream.sources, self.options, self.world.size)
        if self._length is None or self._length[0] != key:
            (left,) = self.count_batches()
            self._length = key, left + (self._place.batches if self.options.train else 0)
        return self._length[1]

    def __bool__(self) -> bool:
        """Tell that a loader is something: whether it has batches is not asked by `if loader`."""
        return True

    @property
    def batches_left(self) -> int:
        """Return how many batches are still to come in this iteration."""
        return len(self) - self._place.batches

    @cached_property
    def steps_per_epoch(self) -> int:
        """Return how many optimizer steps (of `micro_batches` batches each) the first epoch has; it may be endless."""
        options = self.options if self.options.epochs == 1 else replace(self.options, epochs=1)
        counts = count_rounds(self.stream.sources, options, self._processor, self.world.size, RunState())
        return next(counts).steps

    def count_batches(self, rounds: int = 1) -> list[int]:
        """Return the batches that are left of this iteration, and those of the ones behind it, `rounds` in all.

        With `train=False` iterations are alike, and each counts whole.
        """
        if is_endless(self.options):
            raise TypeError("this loader has no end (epochs=None or stop='never'), so its batches cannot be counted")
        is_train = self.options.train
        state = self._state(self._place) if is_train else RunState()
        counts = count_rounds(self.stream.sources, self.options, self._processor, self.world.size, state)
        found = [count.micro_batches for count in itertools.islice(counts, rounds if is_train else 1)]
        return found if is_train else found * rounds

    def estimate_len(self) -> LengthEstimate:
        """Return about how many batches an iteration has, and how far off that may be, from its first windows."""
        if is_endless(self.options):
            raise TypeError("this loader has no end (epochs=None or stop='never'), so it has no length; count steps")
        return estimate_length(self.stream.sources, self.options, self._processor, self.world.size)

    def state_dict(self, *, ago: int = 0) -> dict[str, str]:
        """Return where the loader stands, behind the last batch that it handed out, as one JSON text under one key.

        Args:
            ago: How many batches the trainer has taken without having trained on them: the state before these.
        """
        if ago and not 0 < ago <= len(self._places):
            raise StateError(
                f"the state {ago} batches ago is not kept ({len(self._places)} are), so it cannot be saved; ask for "
                f"states while the batches are handed out"
            )
        place = self._places[-ago] if ago else self._place
        state = self._state(place) if self.options.train else RunState()
        return state.to_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the batch after which `state_dict` was called, with any number of ranks and workers.

        An open iterator is closed. A loader with `train=False` checks the state and starts at the beginning all the
        same.
        """
        state = RunState.from_dict(state_dict)
        if state.skip is not None:
            raise StateError(
                "this is the state of one worker of a VLMStream, which knows nothing of the others, so a loader cannot "
                "go on from it; load what StreamLoader.state_dict() returned"
            )
        self.close()
        if not self.options.train:
            return
        self._place = _Place(Position.at(state.cursor), state.rounds, state.batches)
        self._places.clear()
        self._length = state.length

    def worker_pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        pool = self._pool
        return pool.pids() if pool is not None else []

    def metrics(self) -> dict[str, float]:
        """Return counts, rates and times per stage so far, for TensorBoard, W&B or a table."""
        pool = self._pool
        return self._meter.numbers(pack_size=self.options.pack_size) | {
            "ready_batches": pool.num_ready() if pool is not None else 0,
            "worker_restarts": self._num_restarts + (pool.num_restarts if pool is not None else 0),
            "resident_megabytes": resident_bytes([os.getpid(), *self.worker_pids()]) / 1e6,
        }

    def serve_metrics(self, port: int, address: str = "127.0.0.1") -> Any:
        """Serve `metrics()` to Prometheus at `http://address:port/metrics`."""
        return serve_prometheus(self.metrics, port, address)

    @cached_property
    def _processor(self) -> Any:
        return open_processor(self.stream.processor)

    @property
    def _iteration(self) -> Iteration | None:
        running = self._running() if self._running is not None else None
        return running if running is not None and running.is_open else None

    @property
    def _pool(self) -> WorkerPool | None:
        running = self._iteration
        return None if running is None else running.pool

    def _state(self, place: _Place) -> RunState:
        length = self._length if place.rounds == self._place.rounds else None
        return RunState(cursor=place.position.state(), rounds=place.rounds, batches=place.batches, length=length)

    def _handed_out(self, delivery: Delivery, waited_s: float) -> None:
        """Note what a batch brought, and move behind it."""
        self.ledger.saw(delivery.num_samples)
        self.ledger.extend(delivery.bad)
        self._meter.add(delivery)
        self._meter.waited(waited_s)
        if self.options.train and self.world.rank == 0:
            self._unknown_labels.saw(delivery)
        self._places.append(self._place)
        self._place = _Place(delivery.behind, self._place.rounds, self._place.batches + 1)

    def _round_ended(self) -> None:
        if self.options.train:
            self._place = _Place(self._place.position, self._place.rounds + 1, 0)
            self._length = None

    def _stopped(self, num_restarts: int) -> None:
        """Write the position down, which keeps nothing of the iteration alive."""
        self._num_restarts += num_restarts
        self._place = self._place._replace(position=self._place.position.written())


LOADER_ARGUMENTS: Final = tuple(
    name
    for name, parameter in inspect.signature(StreamLoader).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
)
"""What the loader takes itself; everything else is a field of `StreamOptions`."""
