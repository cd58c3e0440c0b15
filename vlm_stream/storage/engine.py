"""What runs the requests of a reader: the event loop for remote stores, threads for files, budgets, counters.

Local files are read by a few threads; shards that pass through the node cache have threads that wait for the network.
An engine belongs to one process.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.storage.cache import ShardDownloads
from vlm_stream.storage.spans import RangeRequest
from vlm_stream.storage.store import Fetched, Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlm_stream.storage.options import ReadOptions, StoreOptions
    from vlm_stream.storage.spans import Span

__all__ = ["Engine", "ReadMetrics", "ReadTotals", "TokenBucket"]

_FILE_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTotals:
    """The counters of a reader at one moment."""

    requests: int = 0
    """Asked of a store, each counted once however often its client tried; a `pread` of a local file counts too."""
    samples: int = 0
    """Handed out, bad ones included."""
    bad_samples: int = 0
    bytes_wanted: int = 0
    """Of the samples that were handed out."""
    bytes_read: int = 0
    """That came over the wire or from a local dataset, used or not; reads of the node cache are not counted."""
    retries: int = 0
    """Reads begun again because a store throttled for longer than its client's own retries, which are not counted."""
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


@dataclass(slots=True)
class TokenBucket:
    """A rate with one second of burst. Amounts larger than the burst are paid off by waiting afterwards."""

    rate: float
    level: float = 0.0
    """Tokens at `time_s`; negative is debt."""
    time_s: float = float("-inf")

    def take(self, amount: float, now_s: float) -> float:
        """Take tokens and return the seconds to wait before using them."""
        grown = self.level + (now_s - self.time_s) * self.rate
        self.level = min(self.rate, grown) - amount
        self.time_s = now_s
        return max(0.0, -self.level / self.rate)


# Budgets hold for the process: readers with the same rate draw from one bucket, all on one event loop.
_BUCKETS: dict[tuple[str, float], TokenBucket] = {}


class Engine:
    """Runs requests against any number of stores."""

    def __init__(self, options: ReadOptions, store_options: StoreOptions | None, metrics: ReadMetrics) -> None:
        self._options = options
        self._store_options = store_options
        self.metrics = metrics
        self._stores: dict[str, Store] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._slots = asyncio.Semaphore(options.max_inflight)
        self._under_way: set[Future[Fetched]] = set()
        self._closing = threading.Event()
        self._downloads = None
        if options.cache_dir is not None:
            self._downloads = ShardDownloads(options, metrics, self._start, self._sleep)

    def submit(self, request: RangeRequest) -> Future[Fetched]:
        """Start a request; those submitted earlier start earlier."""
        store = self._store(request.root)
        if not hasattr(store, "fetch_async"):
            return self._pool("files", _FILE_THREADS).submit(self._fetch_file, store, request)
        if self._downloads is not None:
            pool = self._pool("cached", self._options.max_inflight)
            return pool.submit(self._fetch_cached, self._downloads, store, request)
        return self._start(store, request.path, request.offset, request.size)

    def read_again(self, span: Span) -> Fetched:
        """Read a span whose bytes were found wrong: past the cache, which loses the shard."""
        self.metrics.add(rereads=1)
        store = self._store(span.root)
        request = RangeRequest(span.root, span.path, span.offset, span.size, (0,), span.shard_size, span.etag)
        if not hasattr(store, "fetch_async"):
            return self._fetch_file(store, request)
        if self._downloads is not None:
            self._downloads.discard(store, request)
        fetched = self._start(store, request.path, request.offset, request.size).result()
        if fetched.object_size is None:  # the range lies past the end, and the store did not say where that is
            info = store.head(span.path)
            fetched = Fetched(fetched.data, info.size, info.etag)
        return fetched

    def close(self) -> None:
        """Cancel what is under way and wait until every thread has ended."""
        self._closing.set()
        for future in list(self._under_way):
            future.cancel()
        if sys.is_finalizing():  # the reader was never closed: the interpreter has ended the threads already
            return
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self._stores.clear()

    def _start(self, store: Any, path: str, offset: int, size: int) -> Future[Fetched]:
        """Start one range of a remote store on the event loop."""
        from vlm_stream.storage.remote import in_background

        future = in_background(self._fetch_remote, store.fetch_async, path, offset, size)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        if self._closing.is_set():  # closed meanwhile, by another thread
            future.cancel()
        return future

    async def _fetch_remote(self, fetch: Callable[..., Any], path: str, offset: int, size: int) -> Fetched:
        rates = (("requests", self._options.requests_per_s, 1), ("bytes", self._options.bytes_per_s, size))
        for name, rate, amount in rates:
            if rate is not None:
                bucket = _BUCKETS.setdefault((name, rate), TokenBucket(rate))
                await asyncio.sleep(bucket.take(amount, time.monotonic()))
        async with self._slots:
            fetched: Fetched = await fetch(path, offset, size)
        self.metrics.add(requests=1, bytes_read=len(fetched.data), retries=fetched.num_retries)
        return fetched

    def _fetch_cached(self, downloads: ShardDownloads, store: Store, request: RangeRequest) -> Fetched:
        found = downloads.read(store, request)
        return found or self._start(store, request.path, request.offset, request.size).result()

    def _fetch_file(self, store: Store, request: RangeRequest) -> Fetched:
        fetched = store.fetch(request.path, request.offset, request.size)
        self.metrics.add(requests=1, bytes_read=len(fetched.data))
        return fetched

    def _sleep(self, seconds: float) -> None:
        """Wait, unless the reader is closed meanwhile."""
        if self._closing.wait(seconds):
            raise CancelledError

    def _pool(self, name: str, num_threads: int) -> ThreadPoolExecutor:
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(num_threads, thread_name_prefix="vlm-stream-read")
        return self._pools[name]

    def _store(self, root: str) -> Store:
        if root not in self._stores:
            self._stores[root] = open_store(root, self._store_options)
        return self._stores[root]
