"""`VLMStream`: an IterableDataset whose batches are ready, and whose position is a few kilobytes of JSON.

It runs by itself, in `torch.utils.data.DataLoader` (with `batch_size=None`: batches are made here) and in torchdata's
`StatefulDataLoader`. Every worker plans for itself, since a plan costs milliseconds, and takes each n-th micro-batch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from vlm_stream.encode import EncodeConfig, Encoder
from vlm_stream.plan import Planner
from vlm_stream.storage import ReadOptions, SpanReader
from vlm_stream.stream.collators import make_collator
from vlm_stream.stream.datasets import OpenDatasets
from vlm_stream.stream.pipeline import Delivery, MicroBatch, deliver
from vlm_stream.stream.processors import load_processor
from vlm_stream.stream.rows import RowBuilder
from vlm_stream.stream.sources import Sources, normalise_sources
from vlm_stream.stream.world import find_world
from vlm_stream.tokens import Geometry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.stream.options import StreamOptions

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
        self._state: dict[str, Any] | None = None
        self._skip: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this worker's batches, in plan order."""
        for delivery in self.deliveries():
            yield delivery.batch

    def deliveries(self) -> Iterator[Delivery]:
        """Yield this worker's batches with the cursor behind each, what was bad, and where the time went."""
        processor = load_processor(self.processor)
        geometry = Geometry.from_processor(processor)
        options = self.options
        datasets = OpenDatasets(self.sources, geometry, store_options=options.store)
        planner = Planner(datasets.specs, datasets, options.plan(geometry.digest()))
        encoder = Encoder(processor, EncodeConfig(max_length=options.max_length, inject_fake_image=options.fake_image))
        rows = RowBuilder(encoder, make_collator(processor, options), with_refs=options.with_refs)
        worker = get_worker_info()
        num_workers = worker.num_workers if worker else 1
        with SpanReader(ReadOptions(prefetch_bytes=options.prefetch_bytes), store_options=options.store) as reader:
            for delivery in deliver(self._micro_batches(planner), datasets, reader, rows):
                self._state, self._skip = delivery.state, num_workers - 1
                yield delivery
        self._state = self._skip = None

    def as_deliveries(self) -> IterableDataset[Delivery]:
        """Return this stream as a dataset of deliveries, for loaders that keep the state themselves."""
        return _Deliveries(self)

    def start_at(self, cursor: dict[str, Any] | None) -> None:
        """Begin the next iteration at a cursor (None: at the start), whatever workers there were before."""
        self._state, self._skip = cursor, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that this worker yielded."""
        return {"cursor": copy.deepcopy(self._state), "skip": self._skip}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. `skip` is how many micro-batches belong to the other workers before this one's next."""
        self._state, self._skip = state["cursor"], state["skip"]

    def _micro_batches(self, planner: Planner) -> Iterator[MicroBatch]:
        worker = get_worker_info()
        num_workers, first = (worker.num_workers, worker.id) if worker else (1, 0)
        if self._skip is not None:
            first = self._skip
        number = 0
        for step in planner.steps(self.options.shape(self.world.size), self._state):
            for micro in range(step.micro_begin, step.shape.micro_batches):
                if number >= first and (number - first) % num_workers == 0:
                    yield MicroBatch(step=step, micro=micro, rank=self.world.rank)
                number += 1


class _Deliveries(IterableDataset[Delivery]):
    """A stream whose items are deliveries."""

    def __init__(self, stream: VLMStream) -> None:
        super().__init__()
        self._stream = stream

    def __iter__(self) -> Iterator[Delivery]:
        return self._stream.deliveries()
