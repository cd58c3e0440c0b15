"""What the dispatcher and its schedule are made of: options, batches, builders, moves, what is urgent, what is late."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DISPATCH_COUNTS: Final = (
    "worker_restarts",
    "workers_recycled",
    "built_twice",
    "built_by_peers",
    "batches_failed",
    "bytes_built",
)
"""What a dispatcher counts: builders replaced after a loss, and for their memory; batches given to a second builder,
and taken from other loaders; batches that failed; bytes of batches."""

_STUCK: Final = (2.0, 0.1)
"""A builder that takes so many times the expected cost, and so many seconds more, loses what is queued there."""


_BEYOND: Final = 1.5
"""What takes so many times the plausible time is late."""
_UNKNOWN_S: Final = 10.0
"""Nothing is late before this, until some batches have shown what they cost."""
_LEARNED: Final = 8
_NOISE_S: Final = 0.1
"""A batch may take so much longer without a meaning; every limit has as much in it."""
_DECAY: Final = 0.995


class Move(NamedTuple):
    """Give a batch to a builder (or take a queued one back)."""

    builder: int
    number: int
    is_drop: bool = False
    late: int | None = None
    """The builder that has had it for too long, where this one is the second."""


@dataclass(slots=True, eq=False)
class QueuedBatch:
    """A batch that is planned and not taken."""

    number: int
    seconds: float
    num_bytes: int
    num_samples: int
    builders: list[int] = field(default_factory=list)
    """Those that have it now."""
    is_begun: bool = False
    is_done: bool = False
    lent_at: float | None = None
    """Since when a peer builds it."""
    result: Any = None


@dataclass(slots=True, eq=False)
class ScheduledBuilder:
    """What a builder was given."""

    queue: deque[QueuedBatch] = field(default_factory=deque)
    """Given to it in this order; it works on the first."""
    since: float = 0.0
    """When it could begin with the first."""
    is_retiring: bool = False
    is_reserve: bool = False
    suspended_at: float | None = None
    """Since when its process does nothing, because the system was told so."""

    def is_open(self, now: float) -> bool:
        """Tell whether it may be given more: one that is stuck would keep it from others."""
        if self.is_retiring or self.suspended_at is not None or not self.queue:
            return not self.is_retiring and self.suspended_at is None
        return now - self.since <= _STUCK[0] * self.queue[0].seconds + _STUCK[1]


class Limit(NamedTuple):
    """So many times the expected seconds, and so many seconds more."""

    times: float
    more: float


class Lateness:
    """How long a batch may take before its builder is doubted: learned from what batches took, and were expected to.

    The worst ratio of the two lately, and the longest time, say how far estimates can be trusted; the lesser of both
    bounds what is plausible. A long batch that was expected to be long makes nobody wait longer for a short one.
    """

    def __init__(self) -> None:
        self._worst = 1.0
        self._slowest = 0.0
        self._num_seen = 0

    def saw(self, expected: float, taken: float) -> None:
        self._num_seen += 1
        ratio = (taken - _NOISE_S) / max(expected, 1e-6)
        self._worst = max(ratio, 1.0 + (self._worst - 1.0) * _DECAY)
        self._slowest = max(taken, self._slowest * _DECAY)

    def is_over(self, limit: Limit, expected: float, spent: float) -> bool:
        """Tell whether a batch has taken longer than is plausible."""
        usual = min(self._worst * expected, self._slowest) if self._num_seen >= _LEARNED else _UNKNOWN_S / _BEYOND
        return spent > max(limit.times * expected, _BEYOND * usual) + limit.more


class Waiting:
    """Batches that no builder has, by urgency: due time minus cost, in units of the time between two hand-outs.

    It is a heap; what no longer waits leaves it when it comes up.
    """

    def __init__(self, batches: Mapping[int, QueuedBatch], is_waiting: Callable[[int], bool]) -> None:
        """Start empty; `batches` are those that were not taken, of which `is_waiting` tells whether one waits."""
        self._batches, self._is_waiting = batches, is_waiting
        self._heap: list[tuple[float, int]] = []
        self._interval = 0.0

    def push(self, batch: QueuedBatch, interval: float) -> None:
        if not 0.8 < interval / (self._interval or interval) < 1.25 or not self._interval:
            self._interval = interval
            numbers = {number for _, number in self._heap if self._is_waiting(number)}
            self._heap = [(self.urgency(self._batches[number]), number) for number in numbers]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self.urgency(batch), batch.number))

    def urgency(self, batch: QueuedBatch) -> float:
        return batch.number - batch.seconds / self._interval

    def first(self) -> QueuedBatch | None:
        while self._heap and not self._is_waiting(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._batches[self._heap[0][1]] if self._heap else None

    def most_urgent(self, count: int) -> list[QueuedBatch]:
        return [self._batches[number] for _, number in heapq.nsmallest(count, self._heap) if self._is_waiting(number)]

    def remove(self, batch: QueuedBatch) -> None:
        if self._heap[0][1] == batch.number:
            heapq.heappop(self._heap)
            return
        self._heap = [entry for entry in self._heap if entry[1] != batch.number]
        heapq.heapify(self._heap)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """How batches are built ahead."""

    num_workers: int
    max_bytes: int = 1 << 30
    """Most bytes of batches that are begun and not taken; one batch for each worker is always allowed."""
    hang_s: float | None = None
    """A worker that takes so long over one batch is replaced; None: only when another one has built that batch, or
    nobody else can."""
    max_restarts: int = 10
    """Replacements over the life of the dispatcher, after which the run ends; those for samples that were then left
    out do not count."""
    max_worker_bytes: int | None = None
    """A worker larger than this is replaced between batches; None: one that has grown by 2 GB, and to more than twice
    what it needed for its first batches."""
    num_reserves: int = 0
    """Builders that work only while the trainer waits, or when no others are left."""
    are_remote: bool = False
    """The builders are elsewhere and may wait for room, however long; those in reserve are processes here."""
    limits: tuple[int, int] | None = None
    """The number of workers follows the trainer's waiting within these; None: it stays."""
