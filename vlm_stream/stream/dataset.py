"""`VLMStream`: an IterableDataset whose batches are ready, and whose position is a few kilobytes of JSON.

It runs by itself, in `torch.utils.data.DataLoader` (with `batch_size=None`: batches are made here) and in torchdata's
`StatefulDataLoader`. Every worker plans for itself, since a plan costs milliseconds, and takes each n-th micro-batch.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from vlm_stream.allocator import keep_freed_memory
from vlm_stream.encode import Encoder
from vlm_stream.errors import DatasetError
from vlm_stream.plan import step_at
from vlm_stream.storage import SpanReader
from vlm_stream.stream.collators import make_collator
from vlm_stream.stream.pipeline import Delivery, MicroBatch, deliver
from vlm_stream.stream.planning import open_planner
from vlm_stream.stream.position import Position
from vlm_stream.stream.processors import open_processor
from vlm_stream.stream.raw import RawRows
from vlm_stream.stream.rows import RowBuilder
from vlm_stream.stream.sources import Sources, normalise_sources
from vlm_stream.stream.world import find_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlm_stream.plan import Planner
    from vlm_stream.stream.options import StreamOptions
    from vlm_stream.tokens import Geometry

__all__ = ["VLMStream"]


class VLMStream(IterableDataset[dict[str, Any]]):
    """Ready batches of one data-parallel rank."""

    def __init__(
        self,
        sources: Sources,
        *,
        processor: Any,
        options: StreamOptions,
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: Any = None,
    ) -> None:
        """Check the settings; nothing is opened before iteration starts."""
        super().__init__()
        self.sources = normalise_sources(sources)
        self.processor = processor
        self.options = options
        self.world = find_world(rank, world_size, device_mesh)
        self.epochs_before = 0
        """Epochs that were delivered by earlier iterations: a loader that is iterated again goes on behind them."""
        self._position = Position.at(None)
        self._skip: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this worker's batches, in plan order."""
        worker = get_worker_info()
        num_workers, first = (worker.num_workers, worker.id) if worker else (1, 0)
        first = first if self._skip is None else self._skip
        try:
            for delivery in self.deliveries(self._position.state(), first, num_workers):
                self._position, self._skip = delivery.behind, num_workers - 1
                yield delivery.batch
        finally:
            self._position = self._position.written()
        self._position, self._skip = Position.at(None), None

    def deliveries(self, cursor: dict[str, Any] | None = None, first: int = 0, stride: int = 1) -> Iterator[Delivery]:
        """Yield batches with the cursor behind each, what was bad, and where the time went.

        Args:
            cursor: Where to start; None: at the start of the run.
            first: How many micro-batches behind the cursor are left to others before the first one.
            stride: Every so many-th micro-batch is made here.
        """

        def wanted(planner: Planner) -> Iterator[MicroBatch]:
            return itertools.islice(self._micro_batches(planner, cursor), first, None, stride)

        return self._deliver(wanted)

    def replay(self, step: int, cursor: dict[str, Any] | None = None) -> Iterator[Delivery]:
        """Yield the batches of one step again, without those before it: planned ahead from a cursor or the start."""

        def wanted(planner: Planner) -> Iterator[MicroBatch]:
            found = step_at(planner, self.options.shape(self.world.size), step, state=cursor)
            for micro in range(found.micro_begin, found.shape.micro_batches):
                yield MicroBatch(step=found, micro=micro, rank=self.world.rank, replayed=True)

        return self._deliver(wanted)

    def _deliver(self, plans: Callable[[Planner], Iterator[MicroBatch]]) -> Iterator[Delivery]:
        options = self.options
        # A daemonic process is a worker, ours or torch's; the trainer's own memory is not ours to tune.
        if multiprocessing.current_process().daemon:
            keep_freed_memory()
        processor = open_processor(self.processor)
        datasets, planner, geometry = open_planner(self.sources, options, processor, epochs_before=self.epochs_before)
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

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that this worker yielded."""
        return {"cursor": copy.deepcopy(self._position.state()), "skip": self._skip}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. `skip` is how many micro-batches belong to the other workers before this one's next."""
        self._position, self._skip = Position.at(state["cursor"]), state["skip"]

    def _micro_batches(self, planner: Planner, cursor: dict[str, Any] | None) -> Iterator[MicroBatch]:
        step = None
        for step in planner.steps(self.options.shape(self.world.size), cursor):
            for micro in range(step.micro_begin, step.shape.micro_batches):
                yield MicroBatch(step=step, micro=micro, rank=self.world.rank)
        if step is None and cursor is None:
            limits = {name: getattr(self.options, name) for name in ("pack_size", "max_length", "token_budget")}
            raise DatasetError(
                f"not one of the samples in {', '.join(source.url for source in self.sources)} fits the limits "
                f"({', '.join(f'{name}={value}' for name, value in limits.items() if value is not None)}), so there is "
                f"nothing to deliver; raise them, or look at the lengths with: vlm-stream stats"
            )
