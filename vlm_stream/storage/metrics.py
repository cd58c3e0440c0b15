"""Counters of one reader: what was asked, what came, what it took."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

__all__ = ["ReadMetrics", "ReadTotals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTotals:
    """The counters at one moment."""

    requests: int = 0
    """Sent to a store, retries included; a `pread` of a local file counts too."""
    samples: int = 0
    """Handed out, bad ones included."""
    bad_samples: int = 0
    bytes_wanted: int = 0
    """Of the samples that were handed out."""
    bytes_read: int = 0
    """That came over the wire or from a local dataset, used or not; reads of the node cache are not counted."""
    retries: int = 0
    throttles: int = 0
    rereads: int = 0
    """Spans read once more because their checksum did not match."""
    cache_hits: int = 0
    """Requests that found their shard in the node cache, or got it from another's download."""
    cache_downloads: int = 0
    """Whole shards that this process brought into the node cache."""
    queue_wait_s: float = 0.0
    """Time that the consumer waited for bytes."""

    @property
    def requests_per_sample(self) -> float:
        """Return how many requests a sample cost."""
        return self.requests / max(self.samples, 1)

    @property
    def read_amplification(self) -> float:
        """Return bytes read per byte wanted."""
        return self.bytes_read / max(self.bytes_wanted, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return counters and the two ratios as JSON values."""
        return asdict(self) | {
            "requests_per_sample": self.requests_per_sample,
            "read_amplification": self.read_amplification,
        }


_COUNTERS: Final = tuple(field.name for field in fields(ReadTotals))


class ReadMetrics:
    """Adds up from several threads."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)

    def add(self, **amounts: float) -> None:
        """Raise counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def totals(self) -> ReadTotals:
        """Return the counters as they are now."""
        with self._lock:
            return ReadTotals(**self._counts)
