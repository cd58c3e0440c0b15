"""Batches that no builder has, by urgency: due time minus expected cost, in units of the time between two hand-outs."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vlm_stream.dispatch.values import QueuedBatch


class Waiting:
    """A heap; batches that no longer wait leave it when they come up."""

    def __init__(self, batches: Mapping[int, QueuedBatch], is_waiting: Callable[[int], bool]) -> None:
        """Start empty.

        Args:
            batches: Those that were not taken, by number.
            is_waiting: Tells of a number whether its batch may be given to a builder.
        """
        self._batches, self._is_waiting = batches, is_waiting
        self._heap: list[tuple[float, int]] = []
        self._interval = 0.0

    def push(self, batch: QueuedBatch, interval: float) -> None:
        """Add a batch; `interval` is the time between two hand-outs."""
        if not 0.8 < interval / (self._interval or interval) < 1.25 or not self._interval:
            self._interval = interval
            numbers = {number for _, number in self._heap if self._is_waiting(number)}
            self._heap = [(self.urgency(self._batches[number]), number) for number in numbers]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self.urgency(batch), batch.number))

    def urgency(self, batch: QueuedBatch) -> float:
        """Return due time minus cost, in intervals."""
        return batch.number - batch.seconds / self._interval

    def first(self) -> QueuedBatch | None:
        """Return the most urgent batch, if there is one."""
        while self._heap and not self._is_waiting(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._batches[self._heap[0][1]] if self._heap else None

    def most_urgent(self, count: int) -> list[QueuedBatch]:
        """Return some batches, the most urgent first."""
        return [self._batches[number] for _, number in heapq.nsmallest(count, self._heap) if self._is_waiting(number)]

    def remove(self, batch: QueuedBatch) -> None:
        """Take a batch out."""
        if self._heap[0][1] == batch.number:
            heapq.heappop(self._heap)
            return
        self._heap = [entry for entry in self._heap if entry[1] != batch.number]
        heapq.heapify(self._heap)
