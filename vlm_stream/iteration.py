"""One iteration over a loader: it owns the builders, which start with the first batch and end with it.

Enters: a plan, where it begins, and who keeps the state. Leaves: batches. It ends at the end of the round, by an error,
when it is closed, when it is dropped, and at the exit of the interpreter.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from vlm_stream.batch import Batch
from vlm_stream.dispatch import Dispatcher, DispatchOptions, ProcessPool, build_inline
from vlm_stream.world import check_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlm_stream.blueprint import Planned
    from vlm_stream.build import Delivery
    from vlm_stream.dispatch import Listener, Pool
    from vlm_stream.options import LoaderOptions
    from vlm_stream.pixels import DeviceFeed
    from vlm_stream.planning import Plan
    from vlm_stream.world import World

__all__ = ["Iteration", "Owner"]


class Owner(Protocol):
    """Keeps the state: a loader, of which these are nobody else's business."""

    def _handed_out(self, planned: Planned, delivery: Delivery, waited_s: float) -> None:
        """Note what a batch brought, and move after it; an error leaves the state before it."""
        ...

    def _round_ended(self) -> None:
        """Go on to the next round."""
        ...

    def _stopped(self, num_restarts: int, num_recycled: int) -> None:
        """Note that the builders have ended, how many failed and were replaced, and how many for their memory."""
        ...


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
        max_bytes = plan.build.options.prefetch_bytes
        if not self._options.num_workers:
            return build_inline(blueprints, plan.build, max_bytes)
        options = self._options

        def open_pool(listener: Listener) -> Pool:
            return ProcessPool(plan.build, listener, start_method=options.start_method)

        self.dispatcher = Dispatcher(
            blueprints,
            open_pool,
            DispatchOptions(
                num_workers=options.num_workers,
                max_bytes=max_bytes,
                hang_s=options.worker_timeout,
                max_restarts=options.max_restarts,
                max_worker_bytes=options.worker_memory,
            ),
        )
        return self.dispatcher

    def close(self) -> None:
        """End it."""
        if os.getpid() != self._pid:  # a fork of the trainer: the builders are not its own
            return
        for part in (self._items, self._deliveries):
            if part is not None:
                part.close()


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

        Args:
            owner: Is told of each batch before it is handed out.
            world: Whose batches.
            open_plan: Returns the plan of this round.
            state: Of the plan, where it begins; None: at the start of the run.
            options: Processes that build; none: this one does.
            feed: Sends batches to a device; None: they stay where they are.
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
        if self.dispatcher is not None and options.num_workers:
            self.dispatcher.set_workers(options.num_workers)
        else:
            self._end()
            self._make(state, options)

    @property
    def is_open(self) -> bool:
        """Tell whether a batch may still be taken."""
        return self._end.alive

    @property
    def dispatcher(self) -> Dispatcher | None:
        """Return the builders that run in other processes."""
        return self._making.dispatcher if self.is_open else None

    def __iter__(self) -> Iteration:
        """Return itself."""
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next batch."""
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
        except StopIteration:
            self._owner._round_ended()
            self._stop()
            raise
        except BaseException as error:
            # The builders are past a batch that nobody got: only a new iterator can deliver it.
            self.close(f"by {type(error).__name__}")
            raise
        return Batch.sealed(batch)

    def close(self, why: str) -> None:
        """End the builders; batches that they have ready are built again by the next iterator."""
        if self.is_open:
            self._why_closed = why
            self._stop()

    def _stop(self) -> None:
        self._end()


def _end(making: _Making, owner: Owner) -> None:
    """End the builders, also those of an iteration that was dropped, and tell the owner."""
    making.close()
    builders = making.dispatcher
    owner._stopped(*((0, 0) if builders is None else (builders.num_restarts, builders.num_recycled)))
