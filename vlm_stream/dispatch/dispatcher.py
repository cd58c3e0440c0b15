"""The dispatcher: blueprints in, deliveries out in plan order, built by a pool.

Enters: blueprints with what comes with each, pulled from the plan by a thread; and a pool. Leaves: the deliveries. What
is begun when and by whom is in `schedule.py`; here are the threads, the losses and the errors. A builder that dies,
hangs or grows is replaced, and its batches are built by others: nothing is lost, repeated or reordered.

A sample that ends its process would do so for ever. Losses are counted for the sample that was worked on; after the
second one (the third, if a signal came that may have been sent from outside) the sample is left out.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vlm_stream.dispatch.costs import CostModel
from vlm_stream.dispatch.pool import Failure, Finished, Joined, Lost
from vlm_stream.dispatch.processes import say_exit
from vlm_stream.dispatch.schedule import Schedule
from vlm_stream.errors import VlmStreamError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlm_stream.blueprint import Blueprint, Planned, SampleRef
    from vlm_stream.build import Delivery
    from vlm_stream.dispatch.pool import Event, Listener, Noted, Pool

__all__ = ["DispatchOptions", "Dispatcher"]

logger = logging.getLogger(__name__)

_CHECK_S: Final = 0.1
_JOIN_S: Final = 5.0
_OWN_LOSSES: Final = 2
_FOREIGN_LOSSES: Final = 3
_FOREIGN_SIGNALS: Final = frozenset((signal.SIGKILL, signal.SIGTERM))
"""Sent by the system or by people, who do not mean the sample; but memory that a sample takes is a cause, too."""
_SETTLED: Final = 16
"""Batches after which a process has the size that it needs."""
_GROWTH: Final = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """How batches are built ahead."""

    num_workers: int
    max_bytes: int = 1 << 30
    """Most bytes of batches that are begun and not taken; one batch for each worker is always allowed."""
    hang_s: float | None = None
    """A worker that takes so long over one batch is replaced; None: only when another one has built that batch."""
    max_restarts: int = 10
    """Replacements over the life of the dispatcher, after which the run ends; those for samples that were then left
    out do not count."""
    max_worker_bytes: int | None = None
    """A worker larger than this is replaced between batches; None: one that has grown by 2 GB, and to more than twice
    what it needed for its first batches."""


@dataclass(slots=True)
class _Builder:
    num_finished: int = 0
    settled_bytes: int = 0
    is_retiring: bool = False


class Dispatcher:
    """Deliveries in plan order; one iteration."""

    def __init__(
        self, plan: Iterator[Planned], open_pool: Callable[[Listener], Pool], options: DispatchOptions
    ) -> None:
        """Start to plan and to build.

        Args:
            plan: Pulled by a thread of the dispatcher, and by nobody else.
            open_pool: Makes the pool, given whom it reports to.
            options: How many builders, and how far ahead.
        """
        self._options = options
        self._schedule = Schedule(options.max_bytes)
        self._costs = CostModel()
        self._planned: dict[int, Planned] = {}
        self._changed = threading.Condition()
        self._builders: dict[int, _Builder] = {}
        self._num_wanted = options.num_workers
        self._num_starting = 0
        self._losses = _Losses()
        self._error: BaseException | None = None
        self._has_plan_ended = False
        self._plan_error: BaseException | None = None
        self._is_closed = False
        self.num_restarts = 0
        self.num_recycled = 0
        self._plan = plan
        self._pool = open_pool(self._on_event)
        with self._changed:
            self._fill_pool()
        self._planner = threading.Thread(target=self._run_plan, name="vlm-stream-plan", daemon=True)
        self._planner.start()

    def __iter__(self) -> Dispatcher:
        """Return itself."""
        return self

    def __next__(self) -> tuple[Planned, Delivery]:
        """Return the next batch of the plan.

        Raises:
            WorkerError: Too many builders were lost, or one failed in a way that cannot be sent.
        """
        with self._changed:
            self._schedule.is_waited_for = not self._schedule.has_next
            try:
                while not self._schedule.has_next:
                    self._raise_or_stop()
                    self._look_for_hangs()
                    self._move()
                    self._changed.wait(_CHECK_S)
            finally:
                self._schedule.is_waited_for = False
            number, result = self._schedule.take(time.monotonic())
            planned = self._planned.pop(number)
            self._move()
            self._changed.notify_all()
        if isinstance(result, Failure):
            _raise(result)
        return planned, result

    def set_workers(self, num_workers: int) -> None:
        """Build with so many builders from now on."""
        with self._changed:
            self._num_wanted = num_workers
            self._retire_surplus()
            self._fill_pool()

    def num_ready(self) -> int:
        """Return how many finished batches wait to be taken."""
        with self._changed:
            return self._schedule.num_ready

    def pids(self) -> list[int]:
        """Return the process ids of the builders."""
        return self._pool.pids()

    def close(self) -> None:
        """End planning and building."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._pool.close()
        self._planner.join(_JOIN_S)
        self._planned.clear()

    # Planning ---------------------------------------------------------------------------------------------------------

    def _run_plan(self) -> None:
        try:
            for planned in self._plan:
                with self._changed:
                    work = planned.blueprint.work
                    number = self._schedule.plan(self._costs.seconds(work), self._costs.num_bytes(work), work.samples)
                    self._planned[number] = planned
                    self._move()
                    while not self._is_closed and not self._schedule.wants_plan:
                        self._changed.wait()
                    if self._is_closed:
                        break
        except BaseException as error:
            self._plan_error = error
        with self._changed:
            self._has_plan_ended = True
            self._changed.notify_all()
        with contextlib.suppress(Exception):
            getattr(self._plan, "close", int)()

    # Events -----------------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        with self._changed:
            if self._is_closed:
                return
            try:
                if isinstance(event, Joined):
                    self._num_starting -= 1
                    self._builders[event.builder] = _Builder()
                    self._schedule.add_builder(event.builder)
                    self._retire_surplus()  # fewer may be wanted since it was started
                elif isinstance(event, Finished):
                    self._on_finished(event)
                else:
                    self._on_lost(event)
                self._move()
            except BaseException as error:  # a thread of the pool must not end by it, and the trainer must hear of it
                self._error = self._error or error
            self._changed.notify_all()

    def _on_finished(self, event: Finished) -> None:
        builder, number, result, resident = event
        if number is None:
            assert isinstance(result, Failure)  # noqa: S101 - only a builder that could not begin has no number
            self._error = self._error or _to_error(result)
            return
        now = time.monotonic()
        planned = self._planned.get(number)
        if isinstance(result, Failure):
            num_bytes, fetch_share = 0, 0.0
        else:
            num_bytes = result.num_bytes
            fetch_share = result.seconds["fetch"] / max(sum(result.seconds.values()), 1e-9)
            if planned is not None:
                self._costs.learn(planned.blueprint.work, result.seconds, num_bytes)
        self._schedule.finish(
            builder, number, now, result=(number, result), num_bytes=num_bytes, fetch_share=fetch_share
        )
        if builder in self._builders:
            self._look_at_size(builder, resident)

    def _look_at_size(self, number: int, resident: int) -> None:
        """Let a process go that has grown far beyond its first batches: decoders leak."""
        builder = self._builders[number]
        builder.num_finished += 1
        if builder.num_finished <= _SETTLED:
            builder.settled_bytes = max(builder.settled_bytes, resident)
        limit = self._options.max_worker_bytes
        has_grown = resident > max(2 * builder.settled_bytes, builder.settled_bytes + _GROWTH)
        if not builder.is_retiring and (has_grown if limit is None else resident > limit):
            logger.info("worker %d has grown to %d MB, so another one takes its place", number, resident >> 20)
            self.num_recycled += 1
            self._retire(number)
            self._fill_pool()
        elif builder.is_retiring:
            self._end_if_idle(number)

    def _on_lost(self, event: Lost) -> None:
        builder = self._builders.pop(event.builder, None)
        self._schedule.remove_builder(event.builder)
        if builder is None:
            self._num_starting -= 1
        if builder is not None and builder.is_retiring:
            return
        self.num_restarts += 1
        noted = event.noted
        what = event.how
        if noted is not None:
            what += " while it worked on row {2} of shard {1} of source {0}".format(*noted.ref)
        is_left_out = noted is not None and self._blame(noted, event.exit_code)
        num_counted = self.num_restarts - self._losses.num_settled
        if num_counted > self._options.max_restarts:
            raise WorkerError(
                f"worker {event.builder} {what}, after {self._options.max_restarts} others had failed, so the run "
                f"ends here; its state is good. Look for what kills workers (memory, a broken decoder: 'dmesg' and the "
                f"ledger tell), lower num_workers or prefetch_bytes, or raise max_restarts."
            )
        logger.warning(
            "worker %d %s; others build its batches, and a new one takes its place%s (restart %d of %d)",
            event.builder,
            what,
            ", without that sample" if is_left_out else "",
            num_counted,
            self._options.max_restarts,
        )
        self._fill_pool()

    def _blame(self, noted: Noted, exit_code: int | None) -> bool:
        """Count a lost builder for the sample that it worked on; tell whether that is left out now.

        One that hung (it has no exit code) may have built many samples in its time: only a sample that took most of
        the time is to blame.
        """
        hang_s = self._options.hang_s
        if exit_code is None and (hang_s is None or noted.seconds < hang_s / 2):
            return False
        return self._losses.add(noted.ref, exit_code)

    # Steps of the above, with the lock held ---------------------------------------------------------------------------

    def _fill_pool(self) -> None:
        num_active = sum(not builder.is_retiring for builder in self._builders.values())
        for _ in range(self._num_wanted - num_active - self._num_starting):
            self._num_starting += 1
            self._pool.grow()

    def _retire_surplus(self) -> None:
        active = [number for number, builder in self._builders.items() if not builder.is_retiring]
        for number in active[self._num_wanted :]:
            self._retire(number)

    def _retire(self, number: int) -> None:
        self._builders[number].is_retiring = True
        self._schedule.retire_builder(number)
        self._end_if_idle(number)

    def _end_if_idle(self, number: int) -> None:
        if not self._schedule.queued(number):
            self._pool.stop(number)

    def _move(self) -> None:
        for move in self._schedule.moves(time.monotonic()):
            if move.is_drop:
                self._pool.drop(move.builder, move.number)
                continue
            blueprint = self._planned[move.number].blueprint
            self._pool.give(move.builder, move.number, blueprint, self._losses.among(blueprint))

    def _look_for_hangs(self) -> None:
        now, hang_s = time.monotonic(), self._options.hang_s
        silent = self._schedule.hung(now)
        for number in self._builders:
            busy = self._schedule.busy_for(number, now)
            if number in silent or (hang_s is not None and busy > hang_s):
                self._pool.stop(number, f"has finished nothing for {busy:.0f} s")

    def _raise_or_stop(self) -> None:
        if self._is_closed:
            raise StopIteration
        if self._error is not None:
            raise self._error
        if self._has_plan_ended and self._schedule.is_empty:
            if self._plan_error is not None:
                raise self._plan_error
            raise StopIteration


class _Losses:
    """How many builders each sample has cost, and which samples are left out from now on."""

    def __init__(self) -> None:
        self._counts: Counter[SampleRef] = Counter()
        self._skipped: dict[SampleRef, str] = {}
        """What the ledger says of each."""
        self.num_settled = 0
        """Losses that cannot come again, since their samples are left out."""

    def among(self, blueprint: Blueprint) -> dict[SampleRef, str]:
        """Return those of a blueprint's samples that are left out."""
        if not self._skipped:
            return {}
        refs = (piece.ref for row in blueprint.rows for piece in row)
        return {ref: self._skipped[ref] for ref in refs if ref in self._skipped}

    def add(self, ref: SampleRef, exit_code: int | None) -> bool:
        """Count one; tell whether the sample is left out now. Without an exit code the builder had hung."""
        if ref in self._skipped:  # it was given before; it counts as a restart, so that this has an end
            return True
        self._counts[ref] += 1
        num_losses = self._counts[ref]
        may_be_foreign = exit_code is not None and -exit_code in _FOREIGN_SIGNALS
        if num_losses < (_FOREIGN_LOSSES if may_be_foreign else _OWN_LOSSES):
            return False
        how = "hung" if exit_code is None else f"died ({say_exit(exit_code)})"
        self._skipped[ref] = (
            f"{num_losses} workers were lost while they worked on it (the last one {how}), so it is left out. Decode "
            f"it by itself to see why, and leave it out of the data or write its media again."
        )
        self.num_settled += num_losses
        return True


def _raise(failure: Failure) -> None:
    raise _to_error(failure)


def _to_error(failure: Failure) -> BaseException:
    if failure.error is None:
        return WorkerError(
            f"a worker failed, so the run ends here; its state is good. The worker's traceback:\n{failure.text}"
        )
    if not isinstance(failure.error, VlmStreamError):
        failure.error.add_note(f"in a worker process:\n{failure.text}")
    return failure.error
