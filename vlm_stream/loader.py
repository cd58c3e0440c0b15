"""`StreamLoader`: ready batches for a trainer, and the state of what the trainer was given.

It plans once, lets builders make batches of the plan, and keeps, for each batch that it hands out, the state after it.
So the state never counts what was prefetched, and it is the same on every rank: a short JSON text that fits any number
of ranks and workers.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import weakref
from collections import Counter, deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vlm_stream.allocator import resident_bytes
from vlm_stream.build import UnknownLabels
from vlm_stream.dispatch import DISPATCH_COUNTS, all_stacks
from vlm_stream.errors import ConfigError, StateError
from vlm_stream.iteration import Iteration
from vlm_stream.ledger import Ledger
from vlm_stream.length import LengthEstimate, count_rounds, estimate_length, is_endless, length_key
from vlm_stream.loader_options import parse_keywords
from vlm_stream.metrics import Meter, serve_prometheus
from vlm_stream.pixels import DEFAULT_DTYPE, DeviceFeed
from vlm_stream.state import RunState
from vlm_stream.stream import VLMStream, refuse_bare_lightning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from vlm_stream.blueprint import Planned
    from vlm_stream.build import Delivery
    from vlm_stream.dispatch import Dispatcher
    from vlm_stream.options import StreamOptions
    from vlm_stream.recipe import Sources
    from vlm_stream.view import Shown, Viewer, ViewServer
    from vlm_stream.world import World

_KEPT_PLACES: Final = 64


class _Place(NamedTuple):
    """Where a loader stands."""

    plan_state: Callable[[], dict[str, Any] | None]
    """Writes the state of the plan."""
    rounds: int
    batches: int

    def written(self) -> _Place:
        """Return the same with the state written, which keeps nothing of an iteration alive."""
        return self._replace(plan_state=partial(_same, self.plan_state()))


def _same(state: dict[str, Any] | None) -> dict[str, Any] | None:
    return state


_START: Final = _Place(partial(_same, None), 0, 0)


class StreamLoader:
    """Iterate over ready batches; save and load the position.

    >>> loader = StreamLoader("shards/", processor=processor, pack_size=4096, num_workers=2)  # doctest: +SKIP
    >>> for batch in loader:                                                                 # doctest: +SKIP
    ...     loss = model(**batch, use_cache=False).loss

    It follows the `Stateful` protocol of torch.distributed.checkpoint. Iterating again after the end delivers the next
    epoch; with `train=False` every iteration delivers the same. The other keyword arguments are the fields of
    `StreamOptions` (what batches are) and `LoaderOptions` (who builds them, where they are delivered).

    Args:
        sources: A path or URL, a list of them, or `{name: {"url": ..., "weight": ..., "sample_ratio": ...}}`;
            `"weights": {entry: ...}` weighs the entries of the meta file that one dataset was made of.
        processor: A transformers processor, or the name or path of one. None: batches hold `RawSample`s, or what
            `collate_fn` makes of them.
        rank: Data-parallel rank. By default it is found when iteration starts: the device mesh's, torch.distributed's,
            Ray Train's, that of torchrun, MPI or SLURM, or 0 of 1.
        world_size: Number of data-parallel ranks, likewise.
        device_mesh: A `DeviceMesh`: model-parallel peers get the same data.
        options: All `StreamOptions` as one value, instead of its fields as keywords.
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
        """Keep the settings; nothing is opened before iteration starts."""
        stream_options, self._workers = parse_keywords(options, keywords)
        self.stream = VLMStream(
            sources,
            processor=processor,
            options=stream_options,
            rank=rank,
            world_size=world_size,
            device_mesh=device_mesh,
        )
        device = self._workers.device
        self._feed = None if device is None else DeviceFeed(device, self._workers.pixel_dtype or DEFAULT_DTYPE)
        self.ledger = Ledger(max_rate=self.options.bad_budget)
        self._meter = Meter()
        self._unknown_labels = UnknownLabels()
        self._place = _START
        self._places: deque[_Place] = deque(maxlen=_KEPT_PLACES)
        """Where it stood before each of the latest batches."""
        self._length: tuple[str, int] | None = None
        self._running: weakref.ref[Iteration] | None = None
        self._ended: Counter[str] = Counter()
        """What has happened to the builders of iterations that have ended."""

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], **overrides: Any) -> StreamLoader:
        """Build a loader from a YAML recipe; keywords replace its values."""
        from vlm_stream.recipe import load_config

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
            self._place = _START
        else:
            refuse_bare_lightning(sys._getframe(1))
            if self._places and self._length is not None and self._length[1] == self._place.batches:
                self._round_ended()  # whoever counts batches takes the last one and does not ask for another
        world = self.stream.world
        if self._workers.ledger_path is not None:
            path = Path(self._workers.ledger_path)
            own = f".rank{world.rank}" if world.size > 1 else ""
            self.ledger.append_to(path.with_name(path.stem + own + path.suffix))
        state = self._place.plan_state()
        open_plan = partial(self.stream.plan, self._place.rounds * (self.options.epochs or 0))
        iteration = Iteration(self, world, open_plan, state, self._workers, self._feed)
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
        places = deque((place.written() for place in self._places), maxlen=_KEPT_PLACES)
        return self.__dict__ | {"_running": None, "_place": self._place.written(), "_places": places}

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

    @property
    def steps_per_epoch(self) -> int:
        """Return how many optimizer steps (of `micro_batches` batches each) the first epoch has; it may be endless."""
        plan = self.stream.plan()
        once = plan.planner.with_config(replace(plan.planner.config, epochs=1))
        return next(count_rounds(replace(plan, planner=once), self.world.size, RunState())).steps

    def count_batches(self, rounds: int = 1) -> list[int]:
        """Return the batches that are left of this iteration, and those of the ones behind it, `rounds` in all.

        With `train=False` iterations are alike, and each counts whole.
        """
        if is_endless(self.options):
            raise TypeError("this loader has no end (epochs=None or stop='never'), so its batches cannot be counted")
        is_train = self.options.train
        state = self._state(self._place) if is_train else RunState()
        counts = count_rounds(self.stream.plan(state.rounds * (self.options.epochs or 0)), self.world.size, state)
        found = [count.micro_batches for count in itertools.islice(counts, rounds if is_train else 1)]
        return found if is_train else found * rounds

    def estimate_len(self) -> LengthEstimate:
        """Return about how many batches an iteration has, and how far off that may be, from its first windows."""
        if is_endless(self.options):
            raise TypeError("this loader has no end (epochs=None or stop='never'), so it has no length; count steps")
        return estimate_length(self.stream.plan(), self.world.size)

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
        self._place = _Place(partial(_same, state.plan), state.rounds, state.batches)
        self._places.clear()
        self._length = state.length

    def set_workers(self, num_workers: int) -> None:
        """Build with another number of workers, now and in later iterations; no batch is lost or repeated."""
        self._workers = self._workers.with_builders(num_workers)
        if (running := self._iteration) is not None:
            running.set_workers(self._workers, self._place.plan_state())

    def worker_pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return self._dispatcher.pids() if self._dispatcher is not None else []

    def stacks(self) -> str:
        """Return where the threads of this process and of its workers are, for when no batch comes."""
        return all_stacks(self.worker_pids())

    def builders(self) -> list[dict[str, Any]]:
        """Return a row for each running builder: where it is, and what it has done.

        `built` and `failed` are batches, `hedged` those that another one was given too because this one was late,
        `waited_s` is for how long the trainer waited for its batches, `seconds` what it worked.
        """
        return self._dispatcher.builders() if self._dispatcher is not None else []

    def costs(self) -> dict[str, Any] | None:
        """Return what building costs by samples, tokens and pixels, as running workers show; None: there are none."""
        return None if self._dispatcher is None else self._dispatcher.costs()

    def metrics(self) -> dict[str, float]:
        """Return counts, rates and times per stage so far, for TensorBoard, W&B or a table."""
        running, counts = self._dispatcher, self._ended.copy()
        counts.update({} if running is None else running.counts())
        return self._meter.numbers(pack_size=self.options.pack_size) | {
            "ready_batches": running.num_ready() if running is not None else 0,
            "builders": len(self.builders()),
            **{name: counts[name] for name in DISPATCH_COUNTS},
            "resident_megabytes": (resident_bytes() + sum(map(resident_bytes, self.worker_pids()))) / 1e6,
        }

    def serve_metrics(self, port: int, address: str = "127.0.0.1") -> Any:
        """Serve `metrics()`, and `builders()` by builder and node, to Prometheus at `http://address:port/metrics`."""
        return serve_prometheus(self.metrics, port, address, builders=self.builders)

    def serve_view(self, port: int = 0, address: str = "127.0.0.1") -> ViewServer:
        """Serve the viewer on this run and its data, from a thread; the URL is in what is returned (extra `view`).

        At another address than loopback the URL has a token in it.
        """
        from vlm_stream.view import ViewServer

        return ViewServer(self._open_viewer(), address, port).start()

    def show(self, batch: Mapping[str, Any]) -> Shown:
        """Return a batch as a document for notebooks; `save(path)` writes it; `with_refs=True` names samples."""
        from vlm_stream.view import show_batch

        viewer = self._open_viewer()
        try:
            return show_batch(viewer, batch)
        finally:
            viewer.close()

    def _open_viewer(self) -> Viewer:
        from vlm_stream.processors import open_processor
        from vlm_stream.view import Viewer, Watched

        stream = self.stream
        processor = copy.deepcopy(open_processor(stream.processor))  # this thread may be encoding with its own
        epochs = self._place.rounds * (self.options.epochs or 0)
        return Viewer(
            stream.sources,
            self.options,
            processor,
            world=self.world.size,
            plan=stream.plan(),
            run=Watched(epochs_before=epochs, loader=self),
        )

    @property
    def _iteration(self) -> Iteration | None:
        running = self._running() if self._running is not None else None
        return running if running is not None and running.is_open else None

    @property
    def _dispatcher(self) -> Dispatcher | None:
        running = self._iteration
        return None if running is None else running.dispatcher

    def _state(self, place: _Place) -> RunState:
        length = self._length if place.rounds == self._place.rounds else None
        return RunState(plan=place.plan_state(), rounds=place.rounds, batches=place.batches, length=length)

    def _handed_out(self, planned: Planned, delivery: Delivery, waited_s: float) -> None:
        """Note what a batch brought, and move after it."""
        self.ledger.saw(delivery.num_samples)
        self.ledger.extend(delivery.bad)
        self._meter.add(delivery)
        self._meter.waited(waited_s)
        if self.options.train and self.world.rank == 0:
            self._unknown_labels.saw(delivery)
        self._places.append(self._place)
        self._place = _Place(planned.state, self._place.rounds, self._place.batches + 1)

    def _round_ended(self) -> None:
        if self.options.train:
            self._place = self._place._replace(rounds=self._place.rounds + 1, batches=0)
            self._length = None

    def _stopped(self, counts: Mapping[str, int]) -> None:
        """Write the state down, which keeps nothing of the iteration alive."""
        self._ended.update(counts)
        self._place = self._place.written()
