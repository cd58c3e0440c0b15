"""Values of the dispatcher and its schedule: options, batches, builders, moves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

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


class Move(NamedTuple):
    """Give a batch to a builder (or take a queued one back)."""

    builder: int
    number: int
    is_drop: bool = False
    is_own: bool = False
    """It is built here, whoever else may be building it."""
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
    is_own: bool = False
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

    def is_open(self, now: float) -> bool:
        """Tell whether it may be given more: one that is stuck would keep it from others."""
        if self.is_retiring or not self.queue:
            return not self.is_retiring
        return now - self.since <= _STUCK[0] * self.queue[0].seconds + _STUCK[1]


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
