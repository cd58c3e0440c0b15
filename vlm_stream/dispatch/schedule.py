"""Which blueprint is begun next, and by which builder: the dispatcher's rules, without threads or clocks.

Enters: blueprints in plan order, builders that come and go, what was finished and taken, and the time. Leaves: `Move`s.
The rules:

    order     least (due time - expected cost) first: what takes long is begun early
    limit     bytes of batches begun and not taken; the next batch to be taken, and one batch for each builder, may
              always be begun; batches far ahead leave a quarter of the limit to those that are due soon
    queue     a builder is given more than one batch only as far as its queue stays short in seconds
    late      batches queued at a builder that takes far too long are given to others; the one that it is stuck in is
              given to a second builder, soonest where that is idle and somebody waits: the first result wins
    suspended what a builder has whose process was told to stop goes to others at once; it may come back
    near      a builder is given batches whose bytes lie near to it, as far as others are not due yet
    reserve   builders kept in reserve work while the trainer waits, and when there are no others
    lent      a batch that a peer builds is waited for like one that a builder has; if it is late, it is built here
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.dispatch.values import Lateness, Limit, Move, QueuedBatch, ScheduledBuilder, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_NEAR: Final = 2
"""Batches up to so many times the builders ahead are due soon."""
_FAR_SHARE: Final = 0.75
_MIN_QUEUE_S: Final = 0.1
_MAX_QUEUE_S: Final = 4.0
_MAX_QUEUE: Final = 16
_CHOICES: Final = 32
"""Among so many of the most urgent batches one is chosen whose bytes lie near."""
_WAITED: Final = Limit(3.0, 0.2)
"""A builder that takes longer than this over the batch that it works on, while somebody waits for that, is late."""
_WAITED_IDLE: Final = Limit(1.5, 0.2)
"""Likewise, while another builder is idle as well."""
_LATE: Final = Limit(4.0, 1.0)
"""Likewise, while another builder is idle and nobody waits."""
_PEER: Final = Limit(6.0, 3.0)
"""Likewise, a batch that a peer builds and somebody here waits for: the peer has a queue, and waits for it too."""
_HUNG: Final = Limit(5.0, 10.0)
"""Likewise, itself, when another builder has finished that batch; where no builder is free to go on, as a peer."""
_ALONE: Final = Limit(10.0, 60.0)
"""Likewise, itself, when nobody is left who could build that batch."""
_SUSPENDED_S: Final = 10.0
"""A builder that is suspended for longer is replaced."""
_MAX_AHEAD: Final = 1024
_MAX_SAMPLES_AHEAD: Final = 16384
_SMOOTHING: Final = 0.1
_DECAY: Final = 0.999


class Schedule:
    """Batches from plan to hand-out."""

    def __init__(self, max_bytes: int) -> None:
        """Start without builders; `max_bytes` bounds what is begun and not taken."""
        self._max_bytes = max_bytes
        self._batches: dict[int, QueuedBatch] = {}  # planned and not taken
        self._builders: dict[int, ScheduledBuilder] = {}
        self._waiting = Waiting(self._batches, self._is_waiting)
        self.head = 0  # number of the next batch to be taken
        self._num_planned = 0
        self._num_bytes = 0  # of what is begun and not taken
        self._num_begun = 0
        self._interval = 0.0  # seconds between two hand-outs, smoothed
        self._taken_at: float | None = None
        self._longest = 0.0  # the most expensive batch expected lately
        self._lateness = Lateness()
        self._queue_s = _MIN_QUEUE_S
        self._samples_waiting = 0
        self._pinned: set[int] = set()  # for builders in reserve alone, as long as there are any
        self.num_twice = 0  # given to a second builder
        self.is_waited_for = False  # whether somebody waits for the next batch right now
        self.size: Callable[[int], int] | None = None  # memory of a batch, as it is known by now; None: as planned
        self.nearness: Callable[[int, int], float] | None = None
        """Returns, for a builder and a batch, the share of its bytes that lie near; None: all builders are alike."""

    # What happens -----------------------------------------------------------------------------------------------------

    def plan(self, seconds: float, num_bytes: int, num_samples: int) -> int:
        """Add the next batch of the plan, with what it is expected to take; return its number."""
        batch = self._batches[self._num_planned] = QueuedBatch(self._num_planned, seconds, num_bytes, num_samples)
        self._num_planned += 1
        self._samples_waiting += num_samples
        self._longest = max(seconds, self._longest * _DECAY)
        self._push(batch)
        return batch.number

    def add_builder(self, builder: int, *, is_reserve: bool = False) -> None:
        self._builders[builder] = ScheduledBuilder(is_reserve=is_reserve)

    def retire_builder(self, builder: int) -> None:
        self._builders[builder].is_retiring = True

    def remove_builder(self, builder: int) -> None:
        """Forget a builder; what it had goes to others."""
        gone = self._builders.pop(builder, None)
        for batch in gone.queue if gone is not None else ():
            self._release(batch, builder)
        for number in self._pinned if gone is not None and gone.is_reserve else ():
            self._push(self._batches[number])  # for others, if none is left

    def note_suspended(self, suspended: Collection[int], now: float) -> list[int]:
        """Note which builders' processes the system has suspended; return those that it has for long."""
        for number, builder in self._builders.items():
            since = now if builder.suspended_at is None else builder.suspended_at
            builder.suspended_at = since if number in suspended else None
        begun = {number: self._builders[number].suspended_at for number in suspended if number in self._builders}
        return [number for number, since in begun.items() if since is not None and now - since > _SUSPENDED_S]

    def pin(self, number: int) -> None:
        """Let only builders in reserve have a batch from now on."""
        batch = self._batches.get(number)
        if batch is not None and not batch.is_done:
            self._pinned.add(number)

    def lend(self, builder: int, number: int, now: float) -> None:
        """Note that a peer builds a batch, so that the builder which it was given to need not."""
        batch, worker = self._batches.get(number), self._builders.get(builder)
        if batch is None or worker is None or batch.is_done or batch not in worker.queue:
            return
        if worker.queue[0] is batch:
            worker.since = now
        worker.queue.remove(batch)
        batch.builders.remove(builder)
        if not batch.builders:
            batch.lent_at = now

    def take_from_peer(self, number: int) -> None:
        """Note that a batch which was lent does not come: it is built here."""
        batch = self._batches.get(number)
        if batch is not None and not batch.is_done and batch.lent_at is not None:
            batch.lent_at = None
            self._put_back(batch)

    def finish(self, builder: int, number: int, now: float, *, result: Any, num_bytes: int, fetch_share: float) -> bool:
        """Note a result; tell whether it is the first of its batch.

        `fetch_share` is how much of its time the builder waited for bytes: long queues hide that.
        """
        worker = self._builders.get(builder)
        if worker is not None:
            worker.suspended_at = None
            if worker.queue and worker.queue[0].number == number and not worker.queue[0].is_done:
                self._lateness.saw(worker.queue[0].seconds, now - worker.since)
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
        self._pinned.discard(number)
        return True

    def take(self, now: float) -> Any:
        """Hand out the next batch's result; it must be there."""
        batch = self._batches.pop(self.head)
        self.head += 1
        self._num_bytes -= batch.num_bytes
        self._num_begun -= 1
        if self._taken_at is not None:
            passed = now - self._taken_at
            self._interval += _SMOOTHING * (passed - self._interval) if self._interval else passed
        self._taken_at = now
        return batch.result

    def clear(self) -> None:
        self._batches.clear()
        self._builders.clear()

    # What is asked ----------------------------------------------------------------------------------------------------

    @property
    def has_next(self) -> bool:
        """Tell whether the next batch can be taken."""
        batch = self._batches.get(self.head)
        return batch is not None and batch.is_done

    @property
    def is_empty(self) -> bool:
        return not self._batches

    @property
    def num_ready(self) -> int:
        return sum(batch.is_done for batch in self._batches.values())

    @property
    def num_idle(self) -> int:
        """Return how many builders, beside those in reserve, have nothing to do."""
        return sum(not builder.queue and not builder.is_reserve for builder in self._builders.values())

    @property
    def wants_plan(self) -> bool:
        """Tell whether the plan should go on: far enough ahead that the longest batch can be begun in time."""
        ahead = self._num_planned - self.head
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
        done = [(n, each.queue[0]) for n, each in self._builders.items() if each.queue and each.queue[0].is_done]
        limit = _HUNG if any(builder.is_open(now) for builder in self._builders.values()) else _PEER
        return [number for number, first in done if self._is_over(limit, first, self.busy_for(number, now))]

    def left_alone(self, now: float, patience: float) -> int | None:
        """Return the builder that keeps the next batch from being taken, if it is silent and nobody else will help.

        `patience` grows with each builder that was replaced for this batch: one that is only slow must come to its end.
        """
        head = self._batches.get(self.head)
        if head is None or head.is_done:
            return None
        others = (builder for number, builder in self._builders.items() if number not in head.builders)
        if len(head.builders) < 2 and any(builder.is_open(now) for builder in others):
            return None
        silent = [
            (self._builders[number].since, number)
            for number in head.builders or self._builders
            for first in list(self._builders[number].queue)[:1]
            if self._is_over(_ALONE, first, self.busy_for(number, now) / patience)
        ]
        return min(silent)[1] if silent else None

    def busy_for(self, builder: int, now: float) -> float:
        """Return for how long a builder has worked on its first batch; 0 where it has none."""
        worker = self._builders.get(builder)
        return now - worker.since if worker is not None and worker.queue else 0.0

    def moves(self, now: float) -> Iterator[Move]:
        """Yield what is to be given to whom."""
        yield from self._take_back(now)
        if self.is_waited_for:
            self._give_up_on_peers(now)
        yield from self._give_pinned(now)
        while (free := self._free(now)) and (batch := self._pop(min(free)[2])) is not None:
            yield self._give(self._choose(free, batch), batch, now)

    # Rules ------------------------------------------------------------------------------------------------------------

    def _push(self, batch: QueuedBatch) -> None:
        self._waiting.push(batch, self._interval or max(batch.seconds, 1e-4) / max(len(self._builders), 1))

    def _pop(self, builder: int) -> QueuedBatch | None:
        """Return the batch for a builder: the most urgent one that may be begun; the next to be taken may always be."""
        may_have_head = self._is_waiting(self.head)
        first = None if may_have_head and self.is_waited_for else self._waiting.first()
        if first is not None and self._may_begin(first):
            batch = self._nearest(first, builder)
            self._waiting.remove(batch)
            return batch
        return self._batches[self.head] if may_have_head else None

    def _may_begin(self, batch: QueuedBatch) -> bool:
        if self.size is not None:
            batch.num_bytes = self.size(batch.number)
        near = batch.number < self.head + _NEAR * len(self._builders)
        limit = self._max_bytes * (1.0 if near else _FAR_SHARE)
        return self._num_begun < len(self._builders) or self._num_bytes + batch.num_bytes <= limit

    def _nearest(self, first: QueuedBatch, builder: int) -> QueuedBatch:
        """Return the most urgent batch, or another one that lies nearer to a builder, as long as the first is not due.

        It is due when it is one of the next that all builders deliver, or late by as many: so none waits for long.
        """
        near, soon = self.nearness, len(self._builders)
        if near is None or first.number < self.head + soon or self._waiting.urgency(first) < self.head - soon:
            return first
        may_begin = filter(self._may_begin, self._waiting.most_urgent(_CHOICES))
        return max(may_begin, key=lambda batch: near(builder, batch.number))

    def _is_waiting(self, number: int) -> bool:
        batch = self._batches.get(number)
        is_free = batch is not None and not batch.is_done and not batch.builders and batch.lent_at is None
        has_reserve = number in self._pinned and any(builder.is_reserve for builder in self._builders.values())
        return is_free and not has_reserve

    def _free(self, now: float) -> list[tuple[float, int, int]]:
        """Return seconds and batches in the queue of each builder that has room, and its number."""
        alone = all(builder.is_reserve for builder in self._builders.values())
        found = []
        for number, builder in self._builders.items():
            length = len(builder.queue)
            if length >= _MAX_QUEUE or not builder.is_open(now):
                continue
            if builder.is_reserve and not alone and (length or not self.is_waited_for):
                continue
            seconds = sum(batch.seconds for batch in builder.queue)
            if not length or seconds < self._queue_s:
                found.append((seconds, length, number))
        return [each for each in found if not self._builders[each[2]].is_reserve] or found

    def _choose(self, free: list[tuple[float, int, int]], batch: QueuedBatch) -> int:
        """Return the builder with the shortest queue; bytes that lie near make up for a part of it."""
        if self.nearness is None:
            return min(free)[2]
        near = self.nearness
        return min(
            (seconds - near(number, batch.number) * batch.seconds, length, number) for seconds, length, number in free
        )[2]

    def _give_pinned(self, now: float) -> Iterator[Move]:
        """Give batches that are pinned to builders in reserve that are idle."""
        for number, builder in self._builders.items() if self._pinned else ():
            waiting = [self._batches[pinned] for pinned in self._pinned if not self._batches[pinned].builders]
            if waiting and builder.is_reserve and not builder.queue and builder.is_open(now):
                yield self._give(number, waiting[0], now)

    def _give_up_on_peers(self, now: float) -> None:
        """Build the batch that is waited for here, if a peer takes longer over it than is plausible."""
        head = self._batches.get(self.head)
        if head is not None and head.lent_at is not None and self._is_over(_PEER, head, now - head.lent_at):
            self.take_from_peer(head.number)

    def _give(self, number: int, batch: QueuedBatch, now: float) -> Move:
        builder = self._builders[number]
        if not builder.queue:
            builder.since = now
        builder.queue.append(batch)
        self._begin(batch)
        late = batch.builders[0] if batch.builders else None
        self.num_twice += late is not None
        batch.builders.append(number)
        return Move(number, batch.number, late=late)

    def _release(self, batch: QueuedBatch, builder: int) -> None:
        """Note that a builder no longer has a batch."""
        batch.builders.remove(builder)
        if not batch.is_done and batch.number in self._batches:
            self._put_back(batch)

    def _put_back(self, batch: QueuedBatch) -> None:
        """Let a batch be given again, if nobody has it."""
        if not batch.builders and batch.is_begun:
            batch.is_begun = False
            self._num_bytes -= batch.num_bytes
            self._num_begun -= 1
            self._samples_waiting += batch.num_samples
            self._push(batch)

    def _begin(self, batch: QueuedBatch) -> None:
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
            gives_up, is_suspended = not builder.is_open(now), builder.suspended_at is not None
            self.num_twice += is_suspended and not first.is_done
            for batch in list(builder.queue)[0 if is_suspended else 1 :]:
                if gives_up or batch.is_done:
                    builder.queue.remove(batch)
                    yield Move(number, batch.number, is_drop=True)
                    self._release(batch, number)
            if is_suspended:
                continue
            second = None if first.is_done or len(first.builders) > 1 else self._helper(first, spent, now)
            if second is not None:
                yield self._give(second, first, now)

    def _helper(self, batch: QueuedBatch, spent: float, now: float) -> int | None:
        """Return who else shall build a batch that is late, if it is and somebody can."""
        others = [
            (builder.is_reserve, len(builder.queue), number)
            for number, builder in self._builders.items()
            if number not in batch.builders and builder.is_open(now)
        ]
        if not others:
            return None
        _, length, number = min(others, key=lambda other: (other[1] > 0, *other))
        if self.is_waited_for and batch.number == self.head:
            return number if self._is_over(_WAITED if length else _WAITED_IDLE, batch, spent) else None
        is_near = batch.number < self.head + _NEAR * len(self._builders)
        return number if is_near and not length and self._is_over(_LATE, batch, spent) else None

    def _is_over(self, limit: Limit, batch: QueuedBatch, spent: float) -> bool:
        return self._lateness.is_over(limit, batch.seconds, spent)
