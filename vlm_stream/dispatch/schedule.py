"""Which blueprint is begun next, and by which builder: the dispatcher's rules, without threads or clocks.

Enters: blueprints in plan order, builders that come and go, what was finished and taken, and the time. Leaves: `Move`s.
The rules:

    order     least (due time - expected cost) first: what takes long is begun early
    limit     bytes of batches begun and not taken; the next batch to be taken, and one batch for each builder, may
              always be begun; batches far ahead leave a quarter of the limit to those that are due soon
    queue     a builder is given more than one batch only as far as its queue stays short in seconds
    late      batches queued at a builder that takes far too long are given to others; the one that it is stuck in is
              given to a second builder: the first result wins

Batches are handed out in plan order, whatever the order of building.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Move", "Schedule"]

_NEAR: Final = 2
"""Batches up to so many times the builders ahead are due soon."""
_FAR_SHARE: Final = 0.75
_MIN_QUEUE_S: Final = 0.1
_MAX_QUEUE_S: Final = 4.0
_MAX_QUEUE: Final = 16
_STUCK: Final = (2.0, 0.1)
"""A builder that takes so many times the expected cost, and so many seconds more, loses what is queued there."""
_WAITED: Final = (3.0, 0.2)
"""Likewise, the batch that it works on, while somebody waits for that."""
_LATE: Final = (4.0, 1.0)
"""Likewise, the batch that it works on, while another builder is idle."""
_HUNG: Final = (5.0, 10.0)
"""Likewise, itself, when another builder has finished that batch."""
_UNKNOWN_S: Final = 10.0
"""Nothing is late before this, until some batches have shown what they cost."""
_LEARNED: Final = 8
_MAX_AHEAD: Final = 1024
_MAX_SAMPLES_AHEAD: Final = 16384
_SMOOTHING: Final = 0.1
_DECAY: Final = 0.999


class Move(NamedTuple):
    """Give a batch to a builder (or take a queued one back)."""

    builder: int
    number: int
    is_drop: bool = False


@dataclass(slots=True, eq=False)
class _Batch:
    number: int
    seconds: float
    num_bytes: int
    num_samples: int
    builders: list[int] = field(default_factory=list)
    """Those that have it now."""
    is_begun: bool = False
    is_done: bool = False
    result: Any = None


@dataclass(slots=True, eq=False)
class _Builder:
    queue: deque[_Batch] = field(default_factory=deque)
    """Given to it in this order; it works on the first."""
    since: float = 0.0
    """When it could begin with the first."""
    is_retiring: bool = False


class Schedule:
    """Batches from plan to hand-out."""

    def __init__(self, max_bytes: int) -> None:
        """Start without builders; `max_bytes` bounds what is begun and not taken."""
        self._max_bytes = max_bytes
        self._batches: dict[int, _Batch] = {}
        """Planned and not taken."""
        self._builders: dict[int, _Builder] = {}
        self._waiting: list[tuple[float, int]] = []
        """Heap of numbers that no builder has, by urgency in units of the interval."""
        self._head = 0
        self._num_planned = 0
        self._num_bytes = 0
        """Of what is begun and not taken."""
        self._num_begun = 0
        self._interval = 0.0
        """Seconds between two hand-outs, smoothed."""
        self._heap_interval = 0.0
        self._taken_at: float | None = None
        self._longest = 0.0
        """The most expensive batch expected lately."""
        self._slowest = 0.0
        """The longest that a batch really took lately."""
        self._queue_s = _MIN_QUEUE_S
        self._num_finished = 0
        self._samples_waiting = 0
        self.is_waited_for = False
        """Whether somebody waits for the next batch right now."""

    # What happens -----------------------------------------------------------------------------------------------------

    def plan(self, seconds: float, num_bytes: int, num_samples: int) -> int:
        """Add the next batch of the plan, with what it is expected to take; return its number."""
        batch = _Batch(self._num_planned, seconds, num_bytes, num_samples)
        self._batches[batch.number] = batch
        self._num_planned += 1
        self._longest = max(seconds, self._longest * _DECAY)
        self._push(batch)
        return batch.number

    def add_builder(self, builder: int) -> None:
        """Let a builder be given batches."""
        self._builders[builder] = _Builder()

    def retire_builder(self, builder: int) -> None:
        """Give it no more."""
        self._builders[builder].is_retiring = True

    def remove_builder(self, builder: int) -> None:
        """Forget a builder; what it had goes to others."""
        gone = self._builders.pop(builder, None)
        for batch in gone.queue if gone is not None else ():
            self._release(batch, builder)

    def finish(self, builder: int, number: int, now: float, *, result: Any, num_bytes: int, fetch_share: float) -> bool:
        """Note a result; tell whether it is the first of its batch.

        Args:
            builder: Who built it.
            number: Which batch.
            now: The time.
            result: Kept until it is taken.
            num_bytes: Its memory.
            fetch_share: How much of its time the builder waited for bytes: long queues hide that.
        """
        worker = self._builders.get(builder)
        if worker is not None:
            if worker.queue and worker.queue[0].number == number:
                self._slowest = max(now - worker.since, self._slowest * _DECAY)
            worker.queue = deque(batch for batch in worker.queue if batch.number != number)
            worker.since = now
        change = 1.5 if fetch_share > 0.1 else 0.98
        self._queue_s = min(max(self._queue_s * change, _MIN_QUEUE_S), _MAX_QUEUE_S)
        batch = self._batches.get(number)
        if batch is not None and builder in batch.builders:
            batch.builders.remove(builder)
        if batch is None or batch.is_done:
            return False
        self._begin(batch)  # it may have been taken back while it was built
        self._num_bytes += num_bytes - batch.num_bytes
        batch.num_bytes = num_bytes
        batch.is_done, batch.result = True, result
        self._num_finished += 1
        return True

    def take(self, now: float) -> Any:
        """Hand out the next batch's result; it must be there."""
        batch = self._batches.pop(self._head)
        self._head += 1
        self._num_bytes -= batch.num_bytes
        self._num_begun -= 1
        if self._taken_at is not None:
            passed = now - self._taken_at
            self._interval += _SMOOTHING * (passed - self._interval) if self._interval else passed
        self._taken_at = now
        return batch.result

    # What is asked ----------------------------------------------------------------------------------------------------

    @property
    def has_next(self) -> bool:
        """Tell whether the next batch can be taken."""
        batch = self._batches.get(self._head)
        return batch is not None and batch.is_done

    @property
    def is_empty(self) -> bool:
        """Tell whether all planned batches were taken."""
        return not self._batches

    @property
    def num_ready(self) -> int:
        """Return how many finished batches wait."""
        return sum(batch.is_done for batch in self._batches.values())

    @property
    def wants_plan(self) -> bool:
        """Tell whether the plan should go on: far enough ahead that the longest batch can be begun in time."""
        ahead = self._num_planned - self._head
        least = 4 * len(self._builders) + 4
        needed = least + (int(2 * self._longest / self._interval) if self._interval else 0)
        waiting = ahead - self._num_begun
        return waiting < least or (waiting < min(needed, _MAX_AHEAD) and self._samples_waiting < _MAX_SAMPLES_AHEAD)

    def queued(self, builder: int) -> list[int]:
        """Return the numbers that a builder has."""
        worker = self._builders.get(builder)
        return [batch.number for batch in worker.queue] if worker is not None else []

    def hung(self, now: float) -> list[int]:
        """Return builders that are silent over a batch that another one has finished."""
        return [
            number
            for number, builder in self._builders.items()
            if builder.queue
            and builder.queue[0].is_done
            and self._is_over(_HUNG, builder.queue[0], now - builder.since)
        ]

    def busy_for(self, builder: int, now: float) -> float:
        """Return for how long a builder has worked on its first batch; 0 where it has none."""
        worker = self._builders.get(builder)
        return now - worker.since if worker is not None and worker.queue else 0.0

    def moves(self, now: float) -> Iterator[Move]:
        """Yield what is to be given to whom."""
        yield from self._take_back(now)
        while (builder := self._roomiest(now)) is not None and (batch := self._pop()) is not None:
            yield self._give(builder, batch, now)

    # Rules ------------------------------------------------------------------------------------------------------------

    def _push(self, batch: _Batch) -> None:
        self._samples_waiting += batch.num_samples
        interval = self._interval or self._guess_interval(batch.seconds)
        if not 0.8 < interval / (self._heap_interval or interval) < 1.25 or not self._heap_interval:
            self._heap_interval = interval
            numbers = {number for _, number in self._waiting if self._is_waiting(number)}
            self._waiting = [(self._urgency(self._batches[number]), number) for number in numbers]
            heapq.heapify(self._waiting)
        heapq.heappush(self._waiting, (self._urgency(batch), batch.number))

    def _guess_interval(self, seconds: float) -> float:
        return max(seconds, 1e-4) / max(len(self._builders), 1)

    def _urgency(self, batch: _Batch) -> float:
        """Return due time minus cost, in intervals."""
        return batch.number - batch.seconds / self._heap_interval

    def _pop(self) -> _Batch | None:
        """Return the most urgent batch that may be begun; the next one to be taken may always be."""
        while self._waiting and not self._is_waiting(self._waiting[0][1]):
            heapq.heappop(self._waiting)
        if not self._waiting:
            return None
        batch = self._batches[self._waiting[0][1]]
        near = batch.number < self._head + _NEAR * len(self._builders)
        limit = self._max_bytes * (1.0 if near else _FAR_SHARE)
        if self._num_begun < len(self._builders) or self._num_bytes + batch.num_bytes <= limit:
            heapq.heappop(self._waiting)
            return batch
        return self._batches[self._head] if self._is_waiting(self._head) else None

    def _is_waiting(self, number: int) -> bool:
        batch = self._batches.get(number)
        return batch is not None and not batch.is_done and not batch.builders

    def _roomiest(self, now: float) -> int | None:
        """Return the builder with the shortest queue, if it is short enough for one more."""
        free = [
            (sum(batch.seconds for batch in worker.queue), len(worker.queue), number)
            for number, worker in self._builders.items()
            if len(worker.queue) < _MAX_QUEUE and self._is_open(worker, now)
        ]
        if not free:
            return None
        seconds, length, number = min(free)
        return number if not length or seconds < self._queue_s else None

    def _is_open(self, builder: _Builder, now: float) -> bool:
        """Tell whether a builder may be given more: one that is stuck would keep it from others."""
        is_stuck = builder.queue and self._is_over(_STUCK, builder.queue[0], now - builder.since)
        return not builder.is_retiring and not is_stuck

    def _give(self, number: int, batch: _Batch, now: float) -> Move:
        builder = self._builders[number]
        if not builder.queue:
            builder.since = now
        builder.queue.append(batch)
        self._begin(batch)
        batch.builders.append(number)
        return Move(number, batch.number)

    def _release(self, batch: _Batch, builder: int) -> None:
        """Note that a builder no longer has a batch."""
        batch.builders.remove(builder)
        if not batch.is_done and batch.number in self._batches:
            self._put_back(batch)

    def _put_back(self, batch: _Batch) -> None:
        """Let a batch be given again, if nobody has it."""
        if not batch.builders and batch.is_begun:
            batch.is_begun = False
            self._num_bytes -= batch.num_bytes
            self._num_begun -= 1
            self._push(batch)

    def _begin(self, batch: _Batch) -> None:
        if not batch.is_begun:
            batch.is_begun = True
            self._num_bytes += batch.num_bytes
            self._num_begun += 1
            self._samples_waiting -= batch.num_samples

    def _take_back(self, now: float) -> Iterator[Move]:
        """Take back what is queued at builders that are stuck or retire, or is finished; give late batches twice."""
        for number, builder in self._builders.items():
            if not builder.queue:
                continue
            first, spent = builder.queue[0], now - builder.since
            gives_up = builder.is_retiring or self._is_over(_STUCK, first, spent)
            for batch in list(builder.queue)[1:]:
                if gives_up or batch.is_done:
                    builder.queue.remove(batch)
                    yield Move(number, batch.number, is_drop=True)
                    self._release(batch, number)
            if (
                not first.is_done
                and len(first.builders) == 1
                and (second := self._helper(first, spent, now)) is not None
            ):
                yield self._give(second, first, now)

    def _helper(self, batch: _Batch, spent: float, now: float) -> int | None:
        """Return who else shall build a batch that is late, if it is and somebody can."""
        others = [
            (len(builder.queue), number)
            for number, builder in self._builders.items()
            if number not in batch.builders and self._is_open(builder, now)
        ]
        if not others:
            return None
        length, number = min(others)
        if self.is_waited_for and batch.number == self._head and self._is_over(_WAITED, batch, spent):
            return number
        is_near = batch.number < self._head + _NEAR * len(self._builders)
        return number if is_near and not length and self._is_over(_LATE, batch, spent) else None

    def _is_over(self, limit: tuple[float, float], batch: _Batch, spent: float) -> bool:
        """Tell whether a batch has taken longer than is plausible."""
        times, more = limit
        plausible = times * batch.seconds + more
        if limit is not _STUCK:  # to build twice costs more than to move what is queued
            plausible = max(plausible, 1.5 * self._slowest if self._num_finished >= _LEARNED else _UNKNOWN_S)
        return spent > plausible
