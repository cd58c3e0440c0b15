"""The threads behind a reader: requests in, futures of bytes out.

Threads, and not an event loop, because the client's blocking calls were measured at half the processor time of its
asynchronous ones, and at a higher rate. Local files that are in memory need no thread at all; others get a few of their
own; so do shards that pass through the node cache, because those wait for the network's threads. An engine belongs to
one process.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from vlm_stream.storage.coalesce import RangeRequest
from vlm_stream.storage.fetch import fetch_range, hedged
from vlm_stream.storage.local import LocalStore
from vlm_stream.storage.shard_download import ShardDownloads
from vlm_stream.storage.store import Fetched, Store, open_store
from vlm_stream.storage.traffic import Traffic
from vlm_stream.storage.verify import crc32c_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vlm_stream.storage.fetch import RangeSource
    from vlm_stream.storage.metrics import ReadMetrics
    from vlm_stream.storage.options import ReadOptions, StoreOptions
    from vlm_stream.storage.values import Span

__all__ = ["Engine"]

_FILE_THREADS = 8
_FEW_BYTES = 64 * 1024
_CACHED_BYTES = 1024 * 1024
_NAME = "vlm-stream-read"


class Engine:
    """Runs requests against any number of stores."""

    def __init__(
        self,
        options: ReadOptions,
        stores: Mapping[str, Store],
        store_options: StoreOptions | None,
        metrics: ReadMetrics,
    ) -> None:
        """Prepare; threads begin with the first request that needs them."""
        self._options = options
        self._given = stores
        self._stores: dict[str, Store] = {}
        self._sources: dict[str, RangeSource | None] = {}
        self._store_options = store_options
        self.metrics = metrics
        # The network's threads bound the reads; a second racer must not wait for the slot of the first.
        num_slots = options.max_inflight * (1 if options.hedge_after_s is None else 2)
        self._traffic = Traffic(metrics, num_slots, options.requests_per_s, options.bytes_per_s)
        self._num_threads = {
            "files": _FILE_THREADS,
            "cached": options.max_inflight,
            "network": options.max_inflight,
            "racers": 2 * options.max_inflight,
        }
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._downloads = None
        if options.cache_dir is not None:
            self._downloads = ShardDownloads(options, self._pool("network"), self._traffic)

    def submit(self, request: RangeRequest) -> Future[Fetched] | Fetched | None:
        """Start a request; those submitted earlier start earlier.

        Returns:
            None when the bytes are in memory already: `read_now` is then cheaper than any thread. If they are few, the
            bytes, which the caller counts: to look whether they are there takes as long as to read them.
        """
        store = self._store(request.root)
        source = self._sources[request.root]
        if source is None:
            if isinstance(store, LocalStore):
                if request.size <= _FEW_BYTES:
                    fetched = store.fetch_resident(request.path, request.offset, request.size)
                    if fetched is not None:
                        return fetched
                elif store.is_resident(request.path, request.offset, request.size):
                    return None
            return self._pool("files").submit(self._fetch_file, store, request)
        if self._downloads is not None:
            return self._pool("cached").submit(self._fetch_cached, self._downloads, source, request)
        return self._pool("network").submit(self._fetch_remote, source, request)

    def local_roots(self, roots: Iterable[str]) -> set[str]:
        """Return those of some roots that are folders."""
        return {root for root in roots if isinstance(self._store(root), LocalStore)}

    def read_now(self, request: RangeRequest) -> Fetched:
        """Read in the caller's thread."""
        return self._fetch_file(self._store(request.root), request)

    def read_again(self, span: Span) -> Fetched:
        """Read a span whose bytes were found wrong: past the cache, which loses the shard."""
        self.metrics.add(rereads=1)
        store = self._store(span.root)
        request = RangeRequest(span.root, span.path, span.offset, span.size, (0,), span.shard_size, span.etag)
        source = self._sources[span.root]
        if source is None:
            return self._fetch_file(store, request)
        if self._downloads is not None:
            self._downloads.discard(source, request)
        fetched = self._pool("network").submit(self._fetch_remote, source, request).result()
        if fetched.object_size is None:  # the range lies behind the end: then the store did not say where that is
            info = store.head(span.path)
            fetched = Fetched(fetched.data, info.size, info.etag)
        return fetched

    def close(self) -> None:
        """Stop what is under way and wait until every thread has ended."""
        self._traffic.close()
        if sys.is_finalizing():  # a reader that nobody closed: the interpreter has ended the threads already
            return
        for pool in list(self._pools.values()):
            pool.shutdown(wait=False, cancel_futures=True)
        for name in ("cached", "network", "racers", "files"):  # each may still begin the next one
            if name in self._pools:
                self._pools[name].shutdown(wait=True, cancel_futures=True)
        self._stores.clear()
        self._sources.clear()

    def _pool(self, name: str) -> ThreadPoolExecutor:
        """Return the threads of one kind, made when they are first needed: most runs need one kind, or none."""
        pool = self._pools.get(name)
        if pool is None:  # two threads may come here at once, and then only one of theirs is kept
            pool = self._pools.setdefault(name, ThreadPoolExecutor(self._num_threads[name], thread_name_prefix=_NAME))
        return pool

    def _store(self, root: str) -> Store:
        store = self._stores.get(root)
        if store is None:
            store = self._given.get(root) or open_store(root, self._store_options)
            # One method tells: to look for all of them takes as long as to read a manifest.
            self._sources[root] = cast("RangeSource", store) if hasattr(store, "open_range") else None
            self._stores[root] = store
        return store

    def _fetch_file(self, store: Store, request: RangeRequest) -> Fetched:
        fetched = store.fetch(request.path, request.offset, request.size)
        self.metrics.add(requests=1, bytes_read=len(fetched.data))
        return fetched

    def _fetch_cached(self, downloads: ShardDownloads, store: RangeSource, request: RangeRequest) -> Fetched:
        return downloads.read(store, request) or self._fetch_remote(store, request)

    def _fetch_remote(self, store: RangeSource, request: RangeRequest) -> Fetched:
        def read() -> Fetched:
            return fetch_range(store, request.path, request.offset, request.size, self._traffic)

        if self._options.hedge_after_s is None:
            fetched = read()
        else:
            fetched = hedged(read, self._pool("racers"), self._options.hedge_after_s, self._traffic)
        if len(request.spans) > 1 or request.size > _CACHED_BYTES:
            return fetched
        # Summed here, while the bytes are in the processor's cache; when their sample is due they no longer are.
        return fetched._replace(crc32c=crc32c_of(fetched.data))
