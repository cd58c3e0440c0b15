"""One iteration over a loader: it owns the builders, which start with the first batch and end with it.

Enters: a plan, where it begins, and who keeps the state. Leaves: batches. It ends at the end of the round, by an error,
when it is closed, when it is dropped, and at the exit of the interpreter.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from vlm_stream.batch import Batch
from vlm_stream.blueprint import Planned
from vlm_stream.build import BuildConfig, Delivery
from vlm_stream.dispatch import (
    Board,
    Dispatcher,
    DispatchOptions,
    Listener,
    Pool,
    ProcessPool,
    RayBoard,
    RayPool,
    SharedPool,
    ShmBoard,
    build_inline,
)
from vlm_stream.errors import ConfigError, StorageError, lacks_descriptors, say_no_descriptors
from vlm_stream.forecast import PlanForecast, open_forecast
from vlm_stream.loader_options import LoaderOptions
from vlm_stream.pixels import DeviceFeed
from vlm_stream.planning import Plan
from vlm_stream.storage import scheme_of
from vlm_stream.world import World, check_world

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """Keeps the state: a loader, of which these are nobody else's business."""

    def _handed_out(self, planned: Planned, delivery: Delivery, waited_s: float) -> None:
        """Note what a batch brought, and move after it; an error leaves the state before it."""

    def _round_ended(self) -> None:
        """Go on to the next round."""

    def _stopped(self, counts: Mapping[str, int]) -> None:
        """Note that the builders have ended, and what has happened to them."""


class _Making:
    """What makes deliveries, once it has begun. It does not know the iteration, which ends it when it is dropped."""

    def __init__(
        self,
        open_plan: Callable[[], Plan],
        world: World,
        state: dict[str, Any] | None,
        options: LoaderOptions,
        feed: DeviceFeed | None,
    ) -> None:
        self._open_plan, self._world, self._state = open_plan, world, state
        self._options, self._feed = options, feed
        self._pid = os.getpid()
        self._items: Any = None
        self._deliveries: Any = None
        self._forecast: PlanForecast | None = None
        self.dispatcher: Dispatcher | None = None

    def items(self) -> Iterator[tuple[tuple[Planned, Delivery], dict[str, Any]]]:
        """Return deliveries with their finished batches; begin with the first call."""
        if self._items is None:
            self._deliveries = self._begin()
            self._items = (
                ((pair, pair[1].batch) for pair in self._deliveries)
                if self._feed is None
                else self._feed.batches(self._deliveries, lambda pair: pair[1].batch)
            )
        items: Iterator[tuple[tuple[Planned, Delivery], dict[str, Any]]] = self._items
        return items

    def _begin(self) -> Iterator[tuple[Planned, Delivery]]:
        plan = self._open_plan()
        blueprints = plan.blueprints(self._world, self._state)
        self._forecast = open_forecast(plan, self._state)
        options, ray = self._options, self._options.ray
        build = replace(plan.build, decode_threads=options.threads_of(self._world))
        max_bytes = build.options.prefetch_bytes
        if options.confine:
            _check_local(plan)
        if not options.num_workers and ray is None:
            return build_inline(blueprints, build, max_bytes)

        board = self._open_board(build)

        def open_pool(listener: Listener) -> Pool:
            if ray is not None:
                num_ranks = self._world.size * (options.peers or self._world.peers)
                return RayPool(build, listener, ray, is_shared=board is not None, num_ranks=num_ranks)
            start, confined = options.start_method, options.confined_bytes
            return ProcessPool(build, listener, start_method=start, confined_bytes=confined)

        self.dispatcher = Dispatcher(
            blueprints,
            open_pool if board is None else lambda listener: SharedPool(open_pool, listener, board),
            DispatchOptions(
                num_workers=options.num_builders,
                max_bytes=max_bytes,
                hang_s=options.worker_timeout,
                max_restarts=options.max_restarts,
                max_worker_bytes=options.worker_memory,
                num_reserves=0 if ray is None else ray.local,
                are_remote=ray is not None,
                limits=None if ray is None else ray.limits,
            ),
        )
        return self.dispatcher

    def _open_board(self, config: BuildConfig) -> Board | None:
        """Return where this loader sees what others build; None: it builds for itself."""
        ray, peers = self._options.ray, self._options.peers or self._world.peers
        pool = None if ray is None else ray.pool
        if peers == 1 and pool is None:
            return None
        group = config.digest()
        if group is None:
            logger.warning(
                "processor or collate_fn cannot be taken apart, so it is not known whether others want the same "
                "batches, and this loader builds its own; give the processor by its name, and a collate_fn without "
                "open files and locks"
            )
            return None
        if ray is not None:  # a batch's name has its rank, so ranks need not see each other's
            return RayBoard(ray, f"{group}:{self._world.rank}", None if pool is not None else peers)
        try:
            return ShmBoard(group, peers)
        except OSError as error:
            logger.warning(
                "shared memory cannot be used (%s), so batches are not shared, and each of %d peers builds its own; "
                "free some of /dev/shm",
                error.strerror,
                peers,
            )
            return None

    def saw(self, planned: Planned) -> None:
        """Note a batch that is handed out."""
        if self._forecast is not None:
            self._forecast.saw(planned.positions)

    def close(self) -> None:
        if os.getpid() != self._pid:  # a fork of the trainer: the builders are not its own
            return
        for part in (self._items, self._deliveries):
            if part is not None:
                part.close()
        if self._forecast is not None:
            self._forecast.close()


def _check_local(plan: Plan) -> None:
    """Refuse to take connections away from builders that need them."""
    for dataset in plan.datasets.opened:
        if scheme_of(dataset.tars) != "file":
            raise ConfigError(
                f"confine takes connections away from workers, and they fetch {dataset.tars} from a store, so nothing "
                f"could be read; copy the dataset to a local disk, or leave confine out and run in a container"
            )


class Iteration:
    """Batches in order."""

    def __init__(
        self,
        owner: Owner,
        world: World,
        open_plan: Callable[[], Plan],
        state: dict[str, Any] | None,
        options: LoaderOptions,
        feed: DeviceFeed | None = None,
    ) -> None:
        """Prepare; builders start with the first batch.

        The owner is told of each batch before it is handed out. `state` is that of the plan, None at the start of the
        run; without a feed batches stay where they are.
        """
        self.world = world
        self._owner = owner
        self._open_plan, self._feed = open_plan, feed
        self._why_closed = ""
        self._make(state, options)

    def _make(self, state: dict[str, Any] | None, options: LoaderOptions) -> None:
        self._making = _Making(self._open_plan, self.world, state, options, self._feed)
        # Also at the exit of the interpreter, before the modules that closing needs are taken apart.
        self._end = weakref.finalize(self, _end, self._making, self._owner)

    def set_workers(self, options: LoaderOptions, state: dict[str, Any] | None) -> None:
        """Go on with the number of workers in `options`; `state` is that of the plan after the last batch."""
        if self.dispatcher is not None and (options.num_workers or options.ray is not None):
            self.dispatcher.set_workers(options.num_builders)
        else:
            self._end()
            self._make(state, options)

    @property
    def is_open(self) -> bool:
        return self._end.alive

    @property
    def dispatcher(self) -> Dispatcher | None:
        """Return the builders that run in other processes."""
        return self._making.dispatcher if self.is_open else None

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._why_closed:
            raise RuntimeError(
                f"this iterator over a StreamLoader has ended ({self._why_closed}), so there is no batch to take from "
                f"it; call iter(loader) for one that goes on where the loader stands"
            )
        if not self.is_open:
            raise StopIteration
        begin = time.monotonic()
        try:
            pair, batch = next(self._making.items())
            check_world(self.world)
            self._owner._handed_out(*pair, time.monotonic() - begin)
            self._making.saw(pair[0])
        except StopIteration:
            self._owner._round_ended()
            self._end()
            raise
        except BaseException as error:
            # The builders are past a batch that nobody got: only a new iterator can deliver it.
            self.close(f"by {type(error).__name__}")
            if lacks_descriptors(error):
                raise StorageError(say_no_descriptors("a batch could not be made")) from error
            raise
        return Batch.sealed(batch)

    def close(self, why: str) -> None:
        """End the builders; batches that they have ready are built again by the next iterator."""
        if self.is_open:
            self._why_closed = why
            self._end()


def _end(making: _Making, owner: Owner) -> None:
    """End the builders, also those of an iteration that was dropped, and tell the owner."""
    making.close()
    owner._stopped({} if making.dispatcher is None else making.dispatcher.counts())
