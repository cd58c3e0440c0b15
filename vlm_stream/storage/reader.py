"""Spans in, samples out: the reader that a builder holds.

`SpanReader.begin` merges the spans of one batch into requests and starts them; `Reading.results` waits, checks the
bytes and cuts them into members. Nothing is read ahead across batches: the caller of `begin` decides how many bytes are
under way. `_Engine` runs the requests: remote ones on the event loop, files in a few threads, shards that pass through
the node cache in threads that wait for the network. It belongs to one process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Union

from vlm_stream.errors import BadSampleError, NotFoundError, StorageError
from vlm_stream.storage.downloads import ShardDownloads
from vlm_stream.storage.options import ReadOptions
from vlm_stream.storage.spans import RangeRequest, check_unchanged, open_sample, plan_requests
from vlm_stream.storage.store import Fetched, Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vlm_stream.storage.options import StoreOptions
    from vlm_stream.storage.spans import Span

SpanResult = Union["Mapping[str, memoryview]", BadSampleError]

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


class ReadMetrics:
    """Adds up from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Any] = {field.name: 0 for field in fields(ReadTotals)}

    def add(self, **amounts: float) -> None:
        """Raise counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def totals(self) -> ReadTotals:
        """Return the counters as they are now."""
        with self._lock:
            return ReadTotals(**self._counts)


class SpanReader:
    """Reads spans of any number of stores. Use it as a context manager; it may be pickled."""

    def __init__(
        self,
        options: ReadOptions | None = None,
        store_options: StoreOptions | None = None,
        *,
        have_answered: bool = False,
    ) -> None:
        """Keep the options; threads and connections begin with the first read.

        Args:
            options: How to merge, how many requests at a time.
            store_options: How to open the stores that the spans name.
            have_answered: They have, to another process: only the deadline ends the patience with them.
        """
        self._options = options or ReadOptions()
        self._store_options = store_options
        self._have_answered = have_answered
        self._metrics = ReadMetrics()
        self._engine: _Engine | None = None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[partial[SpanReader], tuple[object, ...]]:
        """Travel to another process without threads, connections and counts."""
        return partial(type(self), have_answered=self._have_answered), (self._options, self._store_options)

    def __enter__(self) -> SpanReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def metrics(self) -> ReadTotals:
        """Return what was read so far, in this process."""
        self._renew_after_fork()
        return self._metrics.totals()

    def begin(self, spans: Sequence[Span], num_samples: int | None = None, helps: Sequence[Span] = ()) -> Reading:
        """Start to read some spans and return at once; requests that began earlier are served earlier.

        They are so many samples; by default each is one. What helps is read, too, as far as it can be.
        """
        self._renew_after_fork()
        if self._engine is None:
            self._engine = _Engine(self._options, self._store_options, self._metrics, have_answered=self._have_answered)
        return Reading(spans, self._engine, len(spans) if num_samples is None else num_samples, helps)

    def close(self) -> None:
        """Stop what is under way, end the threads, close the connections. A later read starts again."""
        engine, self._engine = self._engine, None
        if engine is not None and self._pid == os.getpid():
            engine.close()

    def _renew_after_fork(self) -> None:
        """Drop what a child cannot use: the parent's threads, and a lock that one of them may have held."""
        if self._pid != os.getpid():
            self._pid, self._engine, self._metrics = os.getpid(), None, ReadMetrics()


class Reading:
    """The spans of one `begin`, being read in the background."""

    def __init__(self, spans: Sequence[Span], engine: _Engine, num_samples: int, helps: Sequence[Span] = ()) -> None:
        self._spans = [*spans, *helps]
        self._num_needed = len(spans)
        self._num_samples = num_samples
        self._engine = engine
        self._requests: deque[tuple[RangeRequest, Future[Fetched]]] = deque()
        """Those whose bytes were not taken yet."""
        self._is_over = False
        for request in plan_requests(self._spans, engine.options):
            self._requests.append((request, engine.submit(request)))

    def results(self) -> list[SpanResult]:
        """Wait; return the members of each span, or what is wrong with it, in the order of the spans. Call it once.

        Those of what only helps come last; whatever keeps them from being read is said of them, and not raised.

        Raises:
            ChangedObjectError: A shard was replaced by another than the manifest describes. (One that was cut short
                or is missing gives bad samples.)
            StorageError: Bytes could not be read, after all retries; or the reading was cancelled.
        """
        parts: list[list[memoryview]] = [[] for _ in self._spans]
        missing: dict[int, BadSampleError] = {}
        try:
            if self._is_over:
                raise CancelledError
            while self._requests:
                request, future = self._requests.popleft()
                try:
                    fetched = future.result()
                except StorageError as error:
                    if not isinstance(error, NotFoundError) and min(request.spans) < self._num_needed:
                        raise
                    bad = BadSampleError("read", "missing_shard", f"{error} The sample is left out.")
                    missing |= dict.fromkeys(request.spans, bad)
                    continue
                check_unchanged(request, fetched)
                for position in request.spans:
                    parts[position].append(_part_of(self._spans[position], request, fetched))
        except CancelledError:
            raise StorageError(
                "The reading was cancelled, or its reader closed, before its samples were there; or they were taken "
                "already. Take the results once, before that, or begin again."
            ) from None
        finally:
            self.cancel()  # the rest is not needed any more
        results = [
            missing[position] if position in missing else self._open(span, parts[position], position < self._num_needed)
            for position, span in enumerate(self._spans)
        ]
        self._engine.metrics.add(
            samples=self._num_samples,
            bad_samples=sum(isinstance(result, BadSampleError) for result in results[: self._num_needed]),
            bytes_wanted=sum(span.size for span in self._spans),
        )
        return results

    def cancel(self) -> None:
        """End the requests; only reads of local files that have started run to their end."""
        self._is_over = True
        for _, future in self._requests:
            future.cancel()
        self._requests.clear()  # an outcome may hold a connection

    def _open(self, span: Span, parts: list[memoryview], is_needed: bool) -> SpanResult:
        """Check and cut one sample; read it once more where its bytes look damaged."""
        result = open_sample(span, parts[0] if len(parts) == 1 else memoryview(b"".join(parts)))
        if is_needed and isinstance(result, BadSampleError) and result.reason in ("crc_mismatch", "truncated"):
            again = self._engine.read_again(span)
            check_unchanged(span, again)
            result = open_sample(span, memoryview(again.data))
        return result


def _part_of(span: Span, request: RangeRequest, fetched: Fetched) -> memoryview:
    """Return those bytes of a request that belong to a span, which may be longer than the request."""
    begin = max(span.offset - request.offset, 0)
    return memoryview(fetched.data)[begin : max(span.offset + span.size - request.offset, 0)]


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


class _Engine:
    """Runs requests against any number of stores."""

    def __init__(
        self, options: ReadOptions, store_options: StoreOptions | None, metrics: ReadMetrics, *, have_answered: bool
    ) -> None:
        self.options = options
        self.metrics = metrics
        self._store_options = store_options
        self._have_answered = have_answered
        self._stores: dict[str, Store] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._slots = asyncio.Semaphore(options.max_inflight)
        self._under_way: set[Future[Fetched]] = set()
        self._closing = threading.Event()
        self._downloads = None
        if options.cache_dir is not None:
            self._downloads = ShardDownloads(options, metrics, self._start, self._sleep, self._stores)

    def submit(self, request: RangeRequest) -> Future[Fetched]:
        """Start a request; those submitted earlier start earlier."""
        store = self._store(request.root)
        if not hasattr(store, "fetch_async"):
            return self._pool("files", _FILE_THREADS).submit(self._fetch_file, store, request)
        if self._downloads is not None:
            pool = self._pool("cached", self.options.max_inflight)
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
        if self._downloads is not None:
            self._downloads.close()
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
        rates = (("requests", self.options.requests_per_s, 1), ("bytes", self.options.bytes_per_s, size))
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
            self._stores[root].has_answered |= self._have_answered
        return self._stores[root]
