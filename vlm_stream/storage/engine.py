"""The threads of a reader: requests in, futures of bytes out.

Local files are read by a few threads. Shards that pass through the node cache have threads of their own, because those
wait for the network's. An engine belongs to one process.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from vlm_stream.storage.coalesce import RangeRequest
from vlm_stream.storage.fetch import fetch_range
from vlm_stream.storage.shard_download import ShardDownloads
from vlm_stream.storage.store import Fetched, Store, open_store
from vlm_stream.storage.traffic import Traffic

if TYPE_CHECKING:
    from vlm_stream.storage.fetch import RangeSource
    from vlm_stream.storage.metrics import ReadMetrics
    from vlm_stream.storage.options import ReadOptions, StoreOptions
    from vlm_stream.storage.values import Span

__all__ = ["Engine"]

_FILE_THREADS = 8
_NAME = "vlm-stream-read"


class Engine:
    """Runs requests against any number of stores."""

    def __init__(self, options: ReadOptions, store_options: StoreOptions | None, metrics: ReadMetrics) -> None:
        """Prepare; threads begin with the first request that needs them."""
        self._stores: dict[str, Store] = {}
        self._sources: dict[str, RangeSource | None] = {}
        self._store_options = store_options
        self.metrics = metrics
        self._traffic = Traffic(metrics, options.max_inflight, options.requests_per_s, options.bytes_per_s)
        self._num_threads = {"files": _FILE_THREADS, "cached": options.max_inflight, "network": options.max_inflight}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._downloads = None
        if options.cache_dir is not None:
            self._downloads = ShardDownloads(options, self._pool("network"), self._traffic)

    def submit(self, request: RangeRequest) -> Future[Fetched]:
        """Start a request; those submitted earlier start earlier."""
        store = self._store(request.root)
        source = self._sources[request.root]
        if source is None:
            return self._pool("files").submit(self._fetch_file, store, request)
        if self._downloads is not None:
            return self._pool("cached").submit(self._fetch_cached, self._downloads, source, request)
        return self._pool("network").submit(self._fetch_remote, source, request)

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
        for name in ("cached", "network", "files"):  # each may still begin the next one
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
            store = open_store(root, self._store_options)
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
        return fetch_range(store, request.path, request.offset, request.size, self._traffic)
