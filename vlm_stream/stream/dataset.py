"""`VLMStream`: an IterableDataset whose batches are ready, and whose state is a few kilobytes of JSON.

It runs by itself, in `torch.utils.data.DataLoader` (with `batch_size=None`: batches are made here) and in torchdata's
`StatefulDataLoader`. Every worker plans for itself, since a plan costs milliseconds, and takes each n-th micro-batch.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.context
import sys
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import IterableDataset, get_worker_info

from vlm_stream.allocator import keep_freed_memory
from vlm_stream.batch import Batch
from vlm_stream.encode import Encoder
from vlm_stream.errors import ConfigError, DatasetError, StateError
from vlm_stream.options import StreamOptions
from vlm_stream.plan import step_at
from vlm_stream.recipe import Sources, normalise_sources
from vlm_stream.storage import SpanReader
from vlm_stream.stream.collators import make_collator
from vlm_stream.stream.label_counts import UnknownLabels
from vlm_stream.stream.length import count_rounds, is_endless, length_key
from vlm_stream.stream.pipeline import Delivery, MicroBatch, deliver
from vlm_stream.stream.planning import open_planner
from vlm_stream.stream.position import Position
from vlm_stream.stream.processors import open_processor
from vlm_stream.stream.raw import RawRows
from vlm_stream.stream.rows import RowBuilder
from vlm_stream.stream.state import RunState
from vlm_stream.stream.world import World, check_world, find_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from vlm_stream.plan import Planner
    from vlm_stream.tokens import Geometry

__all__ = ["STREAM_ARGUMENTS", "VLMStream"]

STREAM_ARGUMENTS: Final = ("sources", "processor", "rank", "world_size", "device_mesh", "options")
"""What stream and loader take beside the fields of `StreamOptions`."""

_DEALERS: Final = ("IterableDatasetShard", "DataLoaderDispatcher")
"""accelerate's classes that deal batches out to processes, whole or cut by rows."""
_MAX_CALLS_UP: Final = 8


class VLMStream(IterableDataset[dict[str, Any]]):
    """Ready batches of one data-parallel rank.

    Args:
        sources: A path or URL, a list of them, or `{name: {"url": ..., "weight": ..., "sample_ratio": ...}}`.
        processor: A transformers processor, or the name or path of one; None: batches hold `RawSample`s.
        rank: Data-parallel rank; by default found when iteration starts (see `StreamLoader`).
        world_size: Number of data-parallel ranks, likewise.
        device_mesh: A `DeviceMesh`: model-parallel peers get the same data.
        options: All options as one value; or give its fields as keywords, as to `StreamLoader`.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        processor: Any,
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: Any = None,
        options: StreamOptions | None = None,
        **keywords: Any,
    ) -> None:
        """Check the settings; nothing is opened before iteration starts."""
        super().__init__()
        self.sources = normalise_sources(sources)
        self.processor = processor
        self.options = StreamOptions.of(options, keywords, others=STREAM_ARGUMENTS)
        self._given_world = (rank, world_size, device_mesh)
        if rank is not None or world_size is not None:
            find_world(rank, world_size)
        self._told_world: World | None = None
        """What the process that started this worker knows of its rank."""
        self._position = Position.at(None)
        self._skip: int | None = None
        self._terms: str | None = None

    @property
    def world(self) -> World:
        """Return which data-parallel rank this process is, as far as anything tells by now."""
        return self._told_world or find_world(*self._given_world)

    def __getstate__(self) -> dict[str, Any]:
        """Tell a worker process that is being started its rank: it has no process group to ask."""
        state = self.__dict__.copy()
        if multiprocessing.context.get_spawning_popen() is not None:
            world = self.world
            if world.told_by != "nobody":
                state |= {"_told_world": world, "_given_world": (None, None, None)}
        return state

    def __len__(self) -> int:
        """Return how many batches an epoch has for this rank, over all workers."""
        if is_endless(self.options):
            raise TypeError("this stream has no end (epochs=None or stop='never'), so it has no length")
        processor = open_processor(self.processor)
        counts = count_rounds(self.sources, self.options, processor, self.world.size, RunState())
        return next(counts).micro_batches

    def __bool__(self) -> bool:
        """Tell that a stream is something: whether it has batches is not asked by `if stream`."""
        return True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return this worker's batches, in plan order."""
        _refuse_wrong_consumers(sys._getframe(1))
        return self._batches()

    def _batches(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        num_workers, first = (worker.num_workers, worker.id) if worker else (1, 0)
        if not self.options.train:
            self._position, self._skip = Position.at(None), None
        first = first if self._skip is None else self._skip
        world = self.world
        terms = length_key(self.sources, self.options, world.size)
        if self._skip and self._terms != terms:
            raise StateError(
                f"this is the state of one of {num_workers} workers, and the number of ranks, batch_size, "
                f"micro_batches, the sources or their weights are not those it was saved with, so the workers would "
                f"not agree on which batches are whose; resume with the same, or train with a StreamLoader, whose "
                f"state fits any"
            )
        self._terms = terms
        unknown_labels = UnknownLabels()
        try:
            for delivery in self.deliveries(self._position.state(), first, num_workers, world=world):
                if worker is None:
                    check_world(world)
                if self.options.train and world.rank == 0 and (worker is None or worker.id == 0):
                    unknown_labels.saw(delivery)
                self._position, self._skip = delivery.behind, num_workers - 1
                yield Batch.sealed(delivery.batch)
        finally:
            self._position = self._position.written()
        self._position, self._skip = Position.at(None), None

    def deliveries(
        self,
        cursor: dict[str, Any] | None = None,
        first: int = 0,
        stride: int = 1,
        *,
        world: World | None = None,
        epochs_before: int = 0,
    ) -> Iterator[Delivery]:
        """Yield batches with the cursor behind each, what was bad, and where the time went.

        Args:
            cursor: Where to start; None: at the start of the run.
            first: How many micro-batches behind the cursor are left to others before the first one.
            stride: Every so many-th micro-batch is made here.
            world: Whose batches; by default this process'.
            epochs_before: Epochs that were delivered by earlier iterations.
        """
        ours = world or self.world

        def wanted(planner: Planner) -> Iterator[MicroBatch]:
            return itertools.islice(self._micro_batches(planner, cursor, ours), first, None, stride)

        return self._deliver(wanted, epochs_before)

    def replay(self, step: int, cursor: dict[str, Any] | None = None, *, epochs_before: int = 0) -> Iterator[Delivery]:
        """Yield the batches of one step again, without those before it: planned ahead from a cursor or the start."""
        world = self.world

        def wanted(planner: Planner) -> Iterator[MicroBatch]:
            found = step_at(planner, self.options.shape(world.size), step, state=cursor)
            for micro in range(found.micro_begin, found.shape.micro_batches):
                yield MicroBatch(step=found, micro=micro, rank=world.rank, replayed=True)

        return self._deliver(wanted, epochs_before)

    def _deliver(self, plans: Callable[[Planner], Iterator[MicroBatch]], epochs_before: int) -> Iterator[Delivery]:
        options = self.options
        # A daemonic process is a worker, ours or torch's; the trainer's own memory is not ours to tune.
        if multiprocessing.current_process().daemon:
            keep_freed_memory()
        processor = open_processor(self.processor)
        datasets, planner, geometry = open_planner(self.sources, options, processor, epochs_before=epochs_before)
        rows = self._rows(processor, geometry)
        if processor is not None:
            datasets.check_counted_for(processor)
        with SpanReader(options.read(), datasets.stores, options.store) as reader:
            yield from deliver(plans(planner), datasets, reader, rows)

    def _rows(self, processor: Any, geometry: Geometry) -> RowBuilder | RawRows:
        options = self.options
        if processor is None:
            return RawRows(options)
        return RowBuilder(
            Encoder(processor, options.encode(geometry.frames)),
            make_collator(processor, options),
            with_refs=options.with_refs,
            pixels=bool(options.pixels),
        )

    def state_dict(self) -> dict[str, str]:
        """Return the position behind the last batch that this worker yielded."""
        if not self.options.train:
            return RunState().to_dict()
        return RunState(cursor=self._position.state(), skip=self._skip, terms=self._terms).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: in the same number of workers, of which each loads its own state."""
        found = RunState.from_dict(state)
        if found.rounds or (found.cursor is not None and found.skip is None):
            raise StateError(
                "this is the state of a StreamLoader, which counts batches over all workers, so a VLMStream cannot "
                "tell which of them are its own; load it into a StreamLoader"
            )
        worker = get_worker_info()
        saved, now = (found.skip or 0) + 1, worker.num_workers if worker else 1
        if found.skip is not None and saved != now:
            raise StateError(
                f"this is the state of one of {saved} workers, and there are {now} now, so they would not agree on "
                f"which batches are whose; resume with num_workers={saved}, or train with a StreamLoader, whose state "
                f"fits any number of workers"
            )
        self._position, self._skip, self._terms = Position.at(found.cursor), found.skip, found.terms

    def _micro_batches(self, planner: Planner, cursor: dict[str, Any] | None, world: World) -> Iterator[MicroBatch]:
        step = None
        for step in planner.steps(self.options.shape(world.size), cursor):
            for micro in range(step.micro_begin, step.shape.micro_batches):
                yield MicroBatch(step=step, micro=micro, rank=world.rank)
        if step is None and cursor is None:
            limits = {name: getattr(self.options, name) for name in ("pack_size", "max_length", "token_budget")}
            raise DatasetError(
                f"not one of the samples in {', '.join(source.url for source in self.sources)} fits the limits "
                f"({', '.join(f'{name}={value}' for name, value in limits.items() if value is not None)}), so there is "
                f"nothing to deliver; raise them, or look at the lengths with: vlm-stream stats"
            )


def _consumers(caller: FrameType) -> Iterator[Any]:
    """Yield the objects whose methods led here: a DataLoader is iterated by its subclass, some calls up."""
    frame: FrameType | None = caller
    for _ in range(_MAX_CALLS_UP):
        if frame is None:
            return
        yield frame.f_locals.get("self")
        frame = frame.f_back


def _refuse_wrong_consumers(caller: FrameType) -> None:
    """Refuse to be iterated by code that would stack ready batches, or deal those of one rank out to all ranks."""
    consumer = caller.f_locals.get("self")
    if getattr(consumer, "auto_collation", False):
        raise ConfigError(
            "a DataLoader with a batch_size collates what it gets, and a VLMStream yields batches, so they would be "
            "stacked or cut; use DataLoader(stream, batch_size=None), or a StreamLoader with your trainer "
            "(vlm_stream.integrations has plugs)"
        )
    if any(type(each).__name__ in _DEALERS for each in _consumers(caller)):
        raise ConfigError(
            "accelerate deals the batches of an IterableDataset out to all processes, and a VLMStream yields one "
            "rank's share already, so most batches would reach nobody; give the trainer a StreamLoader "
            "(accelerator.prepare leaves it as it is)"
        )
