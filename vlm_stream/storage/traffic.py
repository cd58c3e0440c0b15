"""What all requests of one reader share: slots, budgets, counters, and the word that it is over.

Thread-safe. It must not know what a request asks for.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import TYPE_CHECKING

from vlm_stream.storage.retry import AimdLimit, TokenBucket

if TYPE_CHECKING:
    from vlm_stream.storage.metrics import ReadMetrics
    from vlm_stream.storage.retry import FaultKind

__all__ = ["ReadCancelledError", "Traffic"]


class ReadCancelledError(Exception):
    """The reader was closed while this read was under way; nobody waits for its bytes."""


# Budgets hold for the process: readers with the same rate draw from one bucket.
_BUCKETS: dict[tuple[int, str, float], TokenBucket] = {}
_BUCKET_LOCKS: dict[int, threading.Lock] = {}


class Traffic:
    """Slots for requests, lowered by throttling; budgets per second; counters."""

    def __init__(
        self,
        metrics: ReadMetrics,
        max_inflight: int,
        requests_per_s: float | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        """Start with all slots free."""
        self.metrics = metrics
        self._limit = AimdLimit(max_inflight)
        self._rates = (("requests", requests_per_s), ("bytes", bytes_per_s))
        self._num_active = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()

    @property
    def limit(self) -> float:
        """Return how many requests may be in flight now."""
        return self._limit.limit

    def close(self) -> None:
        """End every wait; requests under way stop at their next chunk."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()

    def check_open(self) -> None:
        """Raise when the reader was closed."""
        if self._closing.is_set():
            raise ReadCancelledError

    def sleep(self, seconds: float) -> None:
        """Wait, unless the reader is closed meanwhile."""
        if seconds > 0:
            self._closing.wait(seconds)
        self.check_open()

    def begin_request(self, num_bytes: int) -> None:
        """Wait for the budget of one request of so many bytes, then for a slot, and take it."""
        self._pay(num_bytes)
        with self._changed:
            while self._num_active >= math.floor(self._limit.limit):
                self.check_open()
                self._changed.wait()
            self.check_open()
            self._num_active += 1

    def end_request(self, num_bytes: int, fault: FaultKind | None) -> None:
        """Give the slot back, and record what came of it."""
        throttled = fault == "throttled"
        self.metrics.add(requests=1, bytes_read=num_bytes, throttles=int(throttled))
        with self._changed:
            self._num_active -= 1
            if throttled:
                self._limit.on_throttle(time.monotonic())
            elif fault is None:
                self._limit.on_success()
            self._changed.notify()

    def _pay(self, num_bytes: int) -> None:
        for name, rate in self._rates:
            if rate is not None:
                with _BUCKET_LOCKS.setdefault(os.getpid(), threading.Lock()):
                    bucket = _BUCKETS.setdefault((os.getpid(), name, rate), TokenBucket(rate))
                    wait_s = bucket.take(1 if name == "requests" else num_bytes, time.monotonic())
                self.sleep(wait_s)
