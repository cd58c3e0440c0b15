"""Whose batch comes next at a builder that several runs use: each gets its time by its share.

Enters: jobs of runs, and how long each took. Leaves: the next job. Like the schedule it has no clock and no threads.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")


@dataclass(slots=True, eq=False)
class _Queue(Generic[Job]):
    share: float
    spent_s: float = 0.0
    """Divided by its share."""
    jobs: OrderedDict[int, Job] = field(default_factory=OrderedDict)


class Shares(Generic[Job]):
    """Jobs that wait, by run."""

    def __init__(self) -> None:
        """Start without runs."""
        self._queues: dict[str, _Queue[Job]] = {}
        self._spent_s = 0.0
        """Of the run whose job was taken last: what others have had while a run wanted nothing is not owed to it."""

    def __len__(self) -> int:
        """Return how many jobs wait."""
        return sum(len(queue.jobs) for queue in self._queues.values())

    def add(self, run: str, share: float) -> None:
        """Let a run have jobs, or give one that has them another share."""
        self._queues.setdefault(run, _Queue(share)).share = share

    def remove(self, run: str) -> list[Job]:
        """Forget a run; return its jobs."""
        queue = self._queues.pop(run, None)
        return [] if queue is None else list(queue.jobs.values())

    def put(self, run: str, ticket: int, job: Job) -> None:
        """Add a job behind those of the same run."""
        queue = self._queues[run]
        if not queue.jobs:
            queue.spent_s = max(queue.spent_s, self._spent_s)
        queue.jobs[ticket] = job

    def drop(self, run: str, ticket: int) -> Job | None:
        """Forget a job that waits; return it."""
        queue = self._queues.get(run)
        return None if queue is None else queue.jobs.pop(ticket, None)

    def take(self) -> tuple[str, Job]:
        """Return the next job, and whose it is: of the run that has had the least of its share."""
        waiting = ((queue.spent_s, run) for run, queue in self._queues.items() if queue.jobs)
        self._spent_s, run = min(waiting)
        return run, self._queues[run].jobs.popitem(last=False)[1]

    def spend(self, run: str, seconds: float) -> None:
        """Note how long a job took."""
        if run in self._queues:
            queue = self._queues[run]
            queue.spent_s += seconds / queue.share

    def waits(self, run: str) -> bool:
        """Tell whether a run has jobs that wait."""
        return run in self._queues and bool(self._queues[run].jobs)
