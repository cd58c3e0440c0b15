"""The dispatcher: blueprints in, deliveries out in plan order, built by a pool.

Enters: blueprints with what comes with each, pulled from the plan by a thread; and a pool. Leaves: the deliveries. What
is begun when and by whom is in `schedule.py`, who there is in `team.py`, how many there should be in `scaling.py`,
samples that cost builders in `losses.py`; here are the threads, the losses and the errors. A builder that dies, hangs
or grows is replaced, and its batches are built by others: nothing is lost, repeated or reordered.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.dispatch.costs import CostModel
from vlm_stream.dispatch.pool import PEER, Failure, Finished, Joined, Lent, Lost
from vlm_stream.dispatch.schedule import Schedule
from vlm_stream.dispatch.team import Losses, Scaler, Team
from vlm_stream.dispatch.values import DISPATCH_COUNTS
from vlm_stream.dispatch.watchdog import SAY_S, say_what_is_waited_for
from vlm_stream.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlm_stream.blueprint import Planned
    from vlm_stream.build import Delivery
    from vlm_stream.dispatch.pool import Event, Listener, Noted, Pool
    from vlm_stream.dispatch.values import DispatchOptions

logger = logging.getLogger(__name__)

_CHECK_S: Final = 0.1
_JOIN_S: Final = 5.0
_SETTLED: Final = 16
"""Batches after which a process has the size that it needs."""
_FEW: Final = 4
"""A process builds so many batches before it is replaced for its size: its start takes seconds."""
_GROWTH: Final = 2 << 30
_PORTION: Final = 8
"""Batches by which the plan goes on at a time: its thread is woken once for all of them."""
_START_S: Final = 60.0
"""A builder that is started may take so much longer than one that builds: it imports torch, and loads a processor."""


class Dispatcher:
    """Deliveries in plan order; one iteration."""

    def __init__(
        self, plan: Iterator[Planned], open_pool: Callable[[Listener], Pool], options: DispatchOptions
    ) -> None:
        """Start to plan and to build; a thread pulls the plan, and nobody else does."""
        self._options = options
        self._schedule = Schedule(options.max_bytes)
        self._costs = CostModel()
        self._planned: dict[int, Planned] = {}
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._is_plan_wanted = threading.Condition(lock)
        self._scaler = None if options.limits is None else Scaler(*options.limits)
        self._losses = Losses()
        self._num_lost_here = self._num_lost_in_row = 0
        """Processes of this machine; builders elsewhere, since one of them has finished a batch."""
        self._look_at = 0.0  # when builders are looked at again for being suspended
        self._num_replaced = 0  # over the next batch, when nobody else could build it
        self._doubted: dict[int, float] = {}
        """For how long builders were silent that were replaced so: the user has not said how long that may be."""
        self._has_warned_of_size = False
        self._error: BaseException | None = None
        self._has_plan_ended = False
        self._plan_error: BaseException | None = None
        self._is_closed = False
        self.num_restarts = self.num_recycled = 0
        self._num_lent = self._num_failed = self._num_bytes = 0
        self._plan = plan
        with self._changed:  # builders of a named pool may join at once
            self._pool = open_pool(self._on_event)
            self._schedule.size = lambda number: self._costs.num_bytes(self._planned[number].blueprint.work)
            if (nearness := self._pool.nearness) is not None:
                self._schedule.nearness = lambda builder, number: nearness(builder, self._planned[number].blueprint)
            numbers = (options.num_workers, options.num_reserves)
            self._team = Team(self._pool, self._schedule, *numbers, are_remote=options.are_remote)
        self._planner = threading.Thread(target=self._run_plan, name="vlm-stream-plan", daemon=True)
        self._planner.start()

    def __iter__(self) -> Dispatcher:
        return self

    def __next__(self) -> tuple[Planned, Delivery]:
        """Return the next batch of the plan.

        Raises:
            WorkerError: Too many builders were lost, or one failed in a way that cannot be sent.
        """
        with self._changed:
            begin = time.monotonic()
            self._wait_for_next(begin)
            now = time.monotonic()
            number, builder, result = self._schedule.take(now)
            self._num_replaced = 0
            planned = self._planned.pop(number)
            if builder in self._team.active:
                self._team.active[builder].waited_s += now - begin
            if self._scaler is not None:
                schedule = self._schedule
                spare = {"num_idle": schedule.num_idle, "num_ready": schedule.num_ready}
                self._team.want(self._scaler.saw(now, now - begin, num_builders=self._team.num_usual, **spare))
            self._move()
        if isinstance(result, Failure):
            raise result.to_error()
        return planned, result

    def set_workers(self, num_workers: int) -> None:
        """Build with so many builders from now on; they are no longer more or fewer by themselves."""
        with self._changed:
            self._scaler = None
            self._team.want(num_workers)

    def num_ready(self) -> int:
        with self._changed:
            return self._schedule.num_ready

    def pids(self) -> list[int]:
        return self._pool.pids()

    def builders(self) -> list[dict[str, Any]]:
        with self._changed:
            return self._team.rows()

    def costs(self) -> dict[str, Any]:
        with self._changed:
            return self._costs.to_dict()

    def counts(self) -> dict[str, int]:
        counts = (self.num_restarts, self.num_recycled, self._schedule.num_twice)
        return dict(zip(DISPATCH_COUNTS, (*counts, self._num_lent, self._num_failed, self._num_bytes), strict=True))

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._is_plan_wanted.notify_all()
        self._pool.close()
        self._planner.join(_JOIN_S)
        with self._changed:
            self._planned.clear()
            self._schedule.clear()  # of batches that nobody took, now, not when garbage is collected

    # Planning ---------------------------------------------------------------------------------------------------------

    def _run_plan(self) -> None:
        try:
            for place, planned in enumerate(self._plan, start=1):
                with self._changed:
                    work = planned.blueprint.work
                    number = self._schedule.plan(self._costs.seconds(work), self._costs.num_bytes(work), work.samples)
                    self._planned[number] = planned
                    self._move()
                    while not (self._is_closed or place % _PORTION or self._schedule.wants_plan):
                        self._is_plan_wanted.wait()
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
                    self._team.join(event)
                elif isinstance(event, Finished):
                    self._on_finished(event)
                elif isinstance(event, Lost):
                    self._on_lost(event)
                elif isinstance(event, Lent):
                    self._schedule.lend(event.builder, event.number, time.monotonic())
                else:
                    self._schedule.take_from_peer(event.number)
                self._move()
            except BaseException as error:  # a thread of the pool must not end by it, and the trainer must hear of it
                self._error = self._error or error
            self._changed.notify_all()

    def _on_finished(self, event: Finished) -> None:
        builder, number, result, resident, _ = event
        if number is None:
            assert isinstance(result, Failure)  # noqa: S101 - only a builder that could not begin has no number
            self._error = self._error or result.to_error()
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
        is_first = self._schedule.finish(
            builder, number, now, result=(number, builder, result), num_bytes=num_bytes, fetch_share=fetch_share
        )
        self._num_failed += isinstance(result, Failure)
        self._num_bytes += num_bytes
        self._num_lent += is_first and builder == PEER
        if builder in self._team.active:
            active = self._team.active[builder]
            active.count(result)
            if active.kind != "reserve" and not isinstance(result, Failure):
                self._num_lost_in_row = 0
            self._look_at_size(builder, resident)

    def _look_at_size(self, number: int, resident: int) -> None:
        """Let a process go that has grown far beyond its first batches: decoders leak. Guests are not ours to end."""
        builder, limit = self._team.active[number], self._options.max_worker_bytes
        if builder.num_finished <= _SETTLED:
            builder.settled_bytes = max(builder.settled_bytes, resident)
        has_grown = resident > max(2 * builder.settled_bytes, builder.settled_bytes + _GROWTH)
        if builder.is_retiring:
            self._team.end_if_idle(number)
        elif builder.kind == "guest" or not (has_grown if limit is None else resident > limit):
            return
        elif builder.num_finished < _FEW:
            if not self._has_warned_of_size:
                self._has_warned_of_size = True
                logger.warning(
                    "worker_memory is %d MB, and worker %d has %d MB after its first batches, so each worker is "
                    "replaced after %d batches, and to start another one takes seconds; raise worker_memory, or leave "
                    "it out",
                    (limit or 0) >> 20,
                    number,
                    resident >> 20,
                    _FEW,
                )
        else:
            logger.info("worker %d has grown to %d MB, so another one takes its place", number, resident >> 20)
            self.num_recycled += 1
            self._team.retire(number)
            self._team.fill()

    def _on_lost(self, event: Lost) -> None:
        queued = self._schedule.queued(event.builder)
        if not self._team.lose(event):
            return
        self.num_restarts += 1
        if event.is_remote:
            self._lose_remote(event, queued)
        else:
            self._lose_process(event)
        self._team.fill()

    def _lose_remote(self, event: Lost, queued: list[int]) -> None:
        """Note that a machine or a process elsewhere is gone: that happens, and counts only if nothing else happens.

        All that there are may go at once, with their machines.
        """
        self._num_lost_in_row += 1
        if queued and self._losses.add_batch(queued[0]):
            self._schedule.pin(queued[0])
        limit = self._options.max_restarts + self._team.most
        if self._num_lost_in_row > limit and not self._options.num_reserves:
            raise WorkerError(
                f"builder {event.builder} {event.how}, after {limit} others had gone without a "
                f"batch in between, so the run ends here; its state is good. Look at the cluster (vlm-stream builders "
                f"status, ray status); with local=1 a process here would take over, and name a sample that kills."
            )
        logger.warning("builder %d %s; others build its batches", event.builder, event.how)

    def _lose_process(self, event: Lost) -> None:
        noted, what = event.noted, event.how
        if noted is not None:
            what += " while it worked on row {2} of shard {1} of source {0}".format(*noted.ref)
        is_left_out = noted is not None and self._blame(noted, event)
        self._num_lost_here += 1
        num_counted = self._num_lost_here - self._losses.num_settled
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

    def _blame(self, noted: Noted, event: Lost) -> bool:
        """Count a lost builder for the sample that it worked on; tell whether that is left out now.

        One that hung (it has no exit code) may have built many samples in its time: only a sample that took most of
        the time is to blame. Where the user set no time, it may have been stopped from outside.
        """
        is_doubted = event.builder in self._doubted
        hang_s = self._doubted.pop(event.builder, self._options.hang_s)
        if event.exit_code is None and (hang_s is None or noted.seconds < hang_s / 2):
            return False
        return self._losses.add(noted.ref, event.exit_code, is_doubted=is_doubted)

    # Steps of the above, with the lock held ---------------------------------------------------------------------------

    def _wait_for_next(self, begin: float) -> None:
        self._schedule.is_waited_for = not self._schedule.has_next
        say_at = begin + SAY_S
        try:
            while not self._schedule.has_next:
                self._raise_or_stop()
                self._look_for_hangs()
                self._move()
                if (now := time.monotonic()) > say_at:
                    say_at += SAY_S
                    head = self._planned.get(self._schedule.head)
                    limits = now, now - begin, self._options.hang_s
                    logger.warning("%s", say_what_is_waited_for(self._schedule, self._team, head, *limits))
                self._changed.wait(_CHECK_S)
        finally:
            self._schedule.is_waited_for = False

    def _move(self) -> None:
        for move in self._schedule.moves(time.monotonic()):
            if move.is_drop:
                self._pool.drop(move.builder, move.number)
                continue
            if move.late is not None:
                self._team.active[move.late].num_hedged += 1
            blueprint = self._planned[move.number].blueprint
            skipped = self._losses.among(blueprint)
            self._pool.give(move.builder, move.number, blueprint, skipped)
        if self._schedule.wants_plan:
            self._is_plan_wanted.notify()

    def _look_for_hangs(self) -> None:
        now, hang_s = time.monotonic(), self._options.hang_s
        if now >= self._look_at:  # a file of /proc for each builder
            self._look_at = now + _CHECK_S
            for number in self._schedule.note_suspended(self._pool.suspended(), now):
                self._doubted[number] = math.inf  # whatever it worked on is not to blame
                self._pool.stop(number, "was suspended (SIGSTOP) and did not go on")
        silent = self._schedule.hung(now)
        if hang_s is None and (alone := self._schedule.left_alone(now, 2.0**self._num_replaced)) is not None:
            self._num_replaced += 1
            self._doubted[alone] = self._schedule.busy_for(alone, now)
            silent.append(alone)
        for number in self._team.active:
            busy = self._schedule.busy_for(number, now)
            if number in silent or (hang_s is not None and busy > hang_s):
                self._pool.stop(number, f"has finished nothing for {busy:.0f} s")
        if hang_s is not None and not self._team.active:
            self._look_for_late_starts(now, hang_s + _START_S)

    def _look_for_late_starts(self, now: float, limit: float) -> None:
        """Replace processes that do not come; end the run where even their start does not return."""
        late = {number: now - begun for number, (_, begun) in self._team.starting.items() if now - begun > limit}
        for number, seconds in late.items():
            self._pool.stop(number, f"was not ready {seconds:.0f} s after its start")
        if late and max(late.values()) > limit + _START_S:
            raise WorkerError(
                f"no builder could be started in {max(late.values()):.0f} s, so the run ends here; its state is good. "
                f"Look for what keeps processes from starting (memory, a stopped fork server, a file system that does "
                f"not answer), or raise worker_timeout."
            )

    def _raise_or_stop(self) -> None:
        if self._is_closed:
            raise StopIteration
        if self._error is not None:
            raise self._error
        if self._has_plan_ended and self._schedule.is_empty:
            if self._plan_error is not None:
                raise self._plan_error
            raise StopIteration
