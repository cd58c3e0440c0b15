"""One iteration over a loader: it owns the workers, which start with the first batch and end with it.

Enters: how deliveries are made, and whoever keeps the position. Leaves: batches. It ends at the end of the round, by an
error, when it is closed, when it is dropped, and at the exit of the interpreter.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from vlm_stream.batch import Batch
from vlm_stream.stream import check_world
from vlm_stream.workers import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.pixels import DeviceFeed
    from vlm_stream.stream import Delivery, Position, World
    from vlm_stream.workers import Job, WorkerOptions

__all__ = ["Iteration", "Owner"]


class Owner(Protocol):
    """Whoever keeps the position: a loader, of which these are nobody else's business."""

    def _handed_out(self, delivery: Delivery, waited_s: float) -> None:
        """Note what a batch brought, and move behind it; an error leaves the position before it."""
        ...

    def _round_ended(self) -> None:
        """Go on to the next round."""
        ...

    def _stopped(self, num_restarts: int) -> None:
        """Note that the workers have ended, and how many were replaced."""
        ...


class _Making:
    """What makes deliveries, once it has begun. It does not know the iteration, which ends it when it is dropped."""

    def __init__(self, job: Job, workers: WorkerOptions, feed: DeviceFeed | None, position: Position) -> None:
        self._job, self._workers, self._feed, self._position = job, workers, feed, position
        self._pid = os.getpid()
        self._deliveries: Any = None
        self._items: Any = None
        self.pool: WorkerPool | None = None

    def items(self) -> Iterator[tuple[Delivery, dict[str, Any]]]:
        """Return deliveries with their finished batches; begin with the first call."""
        if self._items is None:
            if self._workers.num_workers:
                self.pool = WorkerPool(self._job, self._position.state(), self._workers)
                self._deliveries = self._from_pool(self.pool)
            else:
                self._deliveries = self._job(self._position.state(), 0, 1)
            self._items = (
                ((delivery, delivery.batch) for delivery in self._deliveries)
                if self._feed is None
                else self._feed.batches(self._deliveries, lambda delivery: delivery.batch)
            )
        items: Iterator[tuple[Delivery, dict[str, Any]]] = self._items
        return items

    def _from_pool(self, pool: WorkerPool) -> Iterator[Delivery]:
        """Yield what workers make; the place behind it is ahead of the loader's where batches are sent early."""
        for delivery in pool.items(lambda: self._position.state()):
            self._position = delivery.behind
            yield delivery

    def close(self) -> None:
        """End it."""
        if os.getpid() != self._pid:  # a fork of the trainer: the workers are not its own
            return
        for part in (self._items, self._deliveries, self.pool):
            if part is not None:
                part.close()


class Iteration:
    """Batches in order."""

    def __init__(
        self,
        owner: Owner,
        world: World,
        job: Job,
        position: Position,
        workers: WorkerOptions,
        feed: DeviceFeed | None = None,
    ) -> None:
        """Prepare; workers start with the first batch.

        Args:
            owner: Is told of each batch before it is handed out.
            world: Whose batches.
            job: Makes deliveries behind a cursor.
            position: Where they begin.
            workers: Processes that do it; none: this one does.
            feed: Sends batches to a device; None: they stay where they are.
        """
        self.world = world
        self._owner = owner
        self._making = _Making(job, workers, feed, position)
        self._why_closed = ""
        # Also at the exit of the interpreter, before the modules that closing needs are taken apart.
        self._end = weakref.finalize(self, self._making.close)

    @property
    def is_open(self) -> bool:
        """Tell whether a batch may still be taken."""
        return self._end.alive

    @property
    def pool(self) -> WorkerPool | None:
        """Return the workers that run."""
        return self._making.pool if self.is_open else None

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
            delivery, batch = next(self._making.items())
            check_world(self.world)
            self._owner._handed_out(delivery, time.monotonic() - begin)
        except StopIteration:
            self._owner._round_ended()
            self._stop()
            raise
        except BaseException as error:
            # The workers are past a batch that nobody got: only a new iterator can deliver it.
            self.close(f"by {type(error).__name__}")
            raise
        return Batch.sealed(batch)

    def close(self, why: str) -> None:
        """End the workers; batches that they have ready are built again by whoever goes on."""
        if self.is_open:
            self._why_closed = why
            self._stop()

    def _stop(self) -> None:
        pool = self.pool
        self._end()
        self._owner._stopped(0 if pool is None else pool.num_restarts)
