"""`VLMStream`: an IterableDataset whose batches are ready, and whose state is a short JSON text.

It runs by itself, in `torch.utils.data.DataLoader` (with `batch_size=None`: batches are made here) and in torchdata's
`StatefulDataLoader`. There every worker plans for itself and builds each n-th batch; `StreamLoader` plans once.
"""

import itertools
import multiprocessing
import multiprocessing.context
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from torch.utils.data import IterableDataset, get_worker_info

from vlm_stream.allocator import keep_freed_memory
from vlm_stream.batch import Batch
from vlm_stream.blueprint import Planned
from vlm_stream.build import Builder, Delivery, UnknownLabels
from vlm_stream.errors import ConfigError, StateError
from vlm_stream.forecast import build_and_tell
from vlm_stream.length import count_rounds, is_endless, length_key
from vlm_stream.options import StreamOptions
from vlm_stream.planning import Plan, open_plan
from vlm_stream.processors import open_processor
from vlm_stream.recipe import Sources, normalise_sources
from vlm_stream.state import RunState
from vlm_stream.world import World, check_world, find_world

_DEALERS: Final = ("IterableDatasetShard", "DataLoaderDispatcher")
"""accelerate's classes that give batches of one process to all processes, whole or cut by rows."""
_MAX_CALLS_UP: Final = 8
_LIGHTNING_CALLS_UP: Final = 4
"""How far above its look at a loader a Lightning trainer is."""


class VLMStream(IterableDataset[dict[str, Any]]):
    """Ready batches of one data-parallel rank.

    Args:
        sources: A path or URL, a list of them, or `{name: {"url": ..., "weight": ..., "sample_ratio": ...}}`;
            `"weights": {entry: ...}` weighs the entries of the meta file that one dataset was made of.
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
        super().__init__()
        self.sources = normalise_sources(sources)
        self.processor = processor
        self.options = StreamOptions.of(options, keywords)
        self._given_world = (rank, world_size, device_mesh)
        if rank is not None or world_size is not None:
            find_world(rank, world_size)
        self._told_world: World | None = None
        """What the process that started this worker knows of its rank."""
        self._opened: Plan | None = None
        self._state = RunState()
        self._newest: tuple[Planned, int, str] | None = None
        """The last batch that was handed out, while iteration goes on; the number of other workers; their terms."""

    @property
    def world(self) -> World:
        """Return which data-parallel rank this process is, as far as anything tells by now."""
        return self._told_world or find_world(*self._given_world)

    def __getstate__(self) -> dict[str, Any]:
        """Tell a worker process that is being started its rank: it has no process group to ask."""
        state = self.__dict__ | {"_opened": None}
        if multiprocessing.context.get_spawning_popen() is not None:
            world = self.world
            if world.told_by != "nobody":
                state |= {"_told_world": world, "_given_world": (None, None, None)}
        return state

    def __len__(self) -> int:
        if is_endless(self.options):
            raise TypeError("this stream has no end (epochs=None or stop='never'), so it has no length")
        return next(count_rounds(self.plan(), self.world.size, RunState())).micro_batches

    def __bool__(self) -> bool:
        """Tell that a stream is something: whether it has batches is not asked by `if stream`."""
        return True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return this worker's batches, in plan order."""
        _refuse_wrong_consumers(sys._getframe(1))
        return self._batches()

    def plan(self, epochs_before: int = 0) -> Plan:
        """Return the plan, opened once; `epochs_before` epochs were delivered by earlier iterations."""
        if self._opened is None:
            processor = open_processor(self.processor)
            self._opened = open_plan(self.sources, self.options, processor, given=self.processor)
        return self._opened.after(epochs_before)

    def deliveries(
        self, state: dict[str, Any] | None = None, first: int = 0, stride: int = 1, *, world: World | None = None
    ) -> Iterator[tuple[Planned, Delivery]]:
        """Yield batches, built in this process, each with the state after it.

        Args:
            state: Of the plan, where to start; None: at the start of the run.
            first: How many batches from there on are left to others before the first one.
            stride: Every so many-th batch is built here.
            world: Whose batches; by default this process'.
        """
        plan = self.plan()
        wanted = itertools.islice(plan.blueprints(world or self.world, state), first, None, stride)
        return build_and_tell(plan, state, wanted)

    def replay(self, step: int, state: dict[str, Any] | None = None, *, epochs_before: int = 0) -> Iterator[Delivery]:
        """Yield the batches of one step again, without those before it: planned ahead from a state or the start."""
        plan = self.plan(epochs_before)
        with Builder(plan.build) as builder:
            for planned in plan.replay(self.world, step, state):
                yield builder.build(planned.blueprint)

    def _batches(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        if worker is not None:  # the trainer's own memory is not ours to tune
            keep_freed_memory()
        num_workers, first = (worker.num_workers, worker.id) if worker else (1, 0)
        if not self.options.train:
            self._state = RunState()
        saved, world = self._state, self.world
        terms = length_key(self.sources, self.options, world.size)
        if saved.skip and saved.terms != terms:
            raise StateError(
                f"this is the state of one of {num_workers} workers, and the number of ranks, batch_size, "
                f"micro_batches, the sources or their weights are not those it was saved with, so the workers would "
                f"not agree on which batches are whose; resume with the same, or train with a StreamLoader, whose "
                f"state fits any"
            )
        first = first if saved.skip is None else saved.skip
        unknown_labels = UnknownLabels()
        try:
            for planned, delivery in self.deliveries(saved.plan, first, num_workers, world=world):
                if worker is None:
                    check_world(world)
                if self.options.train and world.rank == 0 and (worker is None or worker.id == 0):
                    unknown_labels.saw(delivery)
                self._newest = planned, num_workers - 1, terms
                yield Batch.sealed(delivery.batch)
        finally:
            self._state, self._newest = self._written(), None
        self._state = RunState()

    def _written(self) -> RunState:
        if self._newest is None:
            return self._state
        planned, skip, terms = self._newest
        return RunState(plan=planned.state(), skip=skip, terms=terms)

    def state_dict(self) -> dict[str, str]:
        """Return the state after the last batch that this worker yielded."""
        return (self._written() if self.options.train else RunState()).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: in the same number of workers, of which each loads its own state."""
        found = RunState.from_dict(state)
        if found.rounds or (found.plan is not None and found.skip is None):
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
        self._state = found


def _calls(caller: FrameType, most: int) -> Iterator[dict[str, Any]]:
    """Yield the variables of the calls that led here, the nearest first."""
    frame: FrameType | None = caller
    for _ in range(most):
        if frame is None:
            return
        yield frame.f_locals
        frame = frame.f_back


def _refuse_wrong_consumers(caller: FrameType) -> None:
    """Refuse to be iterated by code that would stack ready batches, or give those of one rank to all ranks."""
    consumer = caller.f_locals.get("self")
    if getattr(consumer, "auto_collation", False):
        raise ConfigError(
            "a DataLoader with a batch_size collates what it gets, and a VLMStream yields batches, so they would be "
            "stacked or cut; use DataLoader(stream, batch_size=None), or a StreamLoader with your trainer "
            "(vlm_stream.integrations has plugs)"
        )
    # A DataLoader is iterated by its subclass, some calls up.
    if any(type(names.get("self")).__name__ in _DEALERS for names in _calls(caller, _MAX_CALLS_UP)):
        raise ConfigError(
            "accelerate deals the batches of an IterableDataset out to all processes, and a VLMStream yields one "
            "rank's share already, so most batches would reach nobody; give the trainer a StreamLoader "
            "(accelerator.prepare leaves it as it is)"
        )


def refuse_bare_lightning(caller: FrameType | None) -> None:
    """Refuse a Lightning trainer without `StreamCallback`: it saves and loads the place of a training loader wrongly.

    `caller` is the frame in which a loader is iterated.
    """
    if caller is None or not caller.f_globals.get("__name__", "").endswith(".connectors.data_connector"):
        return
    found = (getattr(names.get("trainer"), "callbacks", None) for names in _calls(caller, _LIGHTNING_CALLS_UP))
    callbacks = next((each for each in found if each is not None), None)
    if callbacks is not None and not any(type(callback).__name__ == "StreamCallback" for callback in callbacks):
        raise ConfigError(
            "Lightning trains on this StreamLoader without its plug: it would save the place of a batch that it has "
            "not trained on and start the first epoch again where it resumes; pass "
            "Trainer(callbacks=[vlm_stream.integrations.lightning.StreamCallback()]), or install this package, so "
            "that Lightning finds it"
        )
