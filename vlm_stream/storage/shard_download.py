"""Requests served from the node cache, whole shards brought into it in parallel parts.

Enters: a request. Leaves: its bytes from the cache, or None when the cache cannot take the shard (too large, no room,
disk full): then the store is read directly, and one warning says so. How files are kept safe is `cache.py`'s concern.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import ChangedObjectError, StorageError
from vlm_stream.storage.cache import NodeCache, NoRoomError, ShardKey
from vlm_stream.storage.fetch import fetch_range
from vlm_stream.storage.store import Fetched
from vlm_stream.storage.verify import check_unchanged_object

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from vlm_stream.storage.cache import CachedShard
    from vlm_stream.storage.coalesce import RangeRequest
    from vlm_stream.storage.options import ReadOptions
    from vlm_stream.storage.traffic import Traffic

__all__ = ["ShardDownloads"]

_log = logging.getLogger(__name__)
# Each of the network's threads may hold one part in memory.
_PART_BYTES = 2 * 1024 * 1024
# Few, so that the first to be needed is whole early.
_SHARDS_AT_A_TIME = 4


class ShardDownloads:
    """The cache of one reader."""

    def __init__(self, options: ReadOptions, network: Executor, traffic: Traffic) -> None:
        """Take the network's threads; nothing is opened before the first request.

        Args:
            options: Where the cache is, its limit, and how many requests at a time.
            network: Threads that fetch parts.
            traffic: Shared with all requests.
        """
        self._cache = NodeCache(options.cache_dir or "", options.cache_bytes or 0)
        self._network = network
        self._traffic = traffic
        self._part_bytes = min(_PART_BYTES, options.max_request_bytes)
        self._max_parts = options.max_inflight
        self._slots = threading.Semaphore(_SHARDS_AT_A_TIME)
        self._sizes: dict[tuple[str, str], int] = {}
        self._disk_failed = False
        self._warned: set[str] = set()

    def read(self, store: Any, request: RangeRequest) -> Fetched | None:
        """Return the request's bytes by way of the cache, or None to read them directly."""
        key = self._key(store, request)
        try:
            shard = self._cache.find(key)
            downloaded = False
            if shard is None:
                if self._disk_failed:
                    return None
                shard, downloaded = self._obtain(store, key)
        except NoRoomError as error:
            self._warn_once("room", f"{error}. Such shards are read from the store each time; raise cache_bytes.")
            return None
        except ChangedObjectError:
            return None  # whoever reads the range itself tells a shard that was cut from one that was replaced
        except OSError as error:
            self._disk_failed = True
            self._warn_once("disk", f"{error.strerror or error}. Shards that are not in it are read from the store.")
            return None
        try:
            self._traffic.metrics.add(cache_downloads=int(downloaded), cache_hits=int(not downloaded))
            return Fetched(shard.read(request.offset, request.size), key.size, request.etag)
        finally:
            shard.close()

    def _obtain(self, store: Any, key: ShardKey) -> tuple[CachedShard, bool]:
        while not self._slots.acquire(timeout=0.1):
            self._traffic.check_open()
        try:
            return self._cache.obtain(
                key, lambda descriptor: self._download(store, key, descriptor), self._traffic.sleep
            )
        finally:
            self._slots.release()

    def discard(self, store: Any, request: RangeRequest) -> None:
        """Remove a shard that holds wrong bytes."""
        try:
            self._cache.discard(self._key(store, request))
        except OSError as error:
            self._warn_once("discard", f"{error.strerror or error}. A damaged shard could not be removed from it.")

    def _key(self, store: Any, request: RangeRequest) -> ShardKey:
        size = request.shard_size
        if size is None:
            place = (request.root, request.path)
            if place not in self._sizes:
                self._sizes[place] = store.head(request.path).size
            size = self._sizes[place]
        return ShardKey(request.root, request.path, size, request.etag)

    def _download(self, store: Any, key: ShardKey, descriptor: int) -> None:
        """Write all parts of a shard, a bounded number of them at a time."""
        bounds = [*range(0, key.size, self._part_bytes), key.size]
        under_way: deque[Future[None]] = deque()
        try:
            for begin, end in itertools.pairwise(bounds):
                if len(under_way) >= self._max_parts:
                    under_way.popleft().result()
                under_way.append(self._network.submit(self._write_part, store, key, descriptor, (begin, end)))
            while under_way:
                under_way.popleft().result()
        finally:
            # The descriptor is closed by the caller: no part may be written after that.
            for future in under_way:
                future.cancel()
            for future in under_way:
                if not future.cancelled():
                    future.exception()

    def _write_part(self, store: Any, key: ShardKey, descriptor: int, bounds: tuple[int, int]) -> None:
        begin, end = bounds
        fetched = fetch_range(store, key.path, begin, end - begin, self._traffic)
        check_unchanged_object(store.url(key.path), (key.size, key.etag), fetched)
        if len(fetched.data) != end - begin:
            raise StorageError(f"{store.url(key.path)} ended at byte {begin + len(fetched.data)} of {key.size}.")
        view = memoryview(fetched.data)
        while view:
            num_written = os.pwrite(descriptor, view, begin)
            view, begin = view[num_written:], begin + num_written

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("The node cache goes on without some shards: %s", message)
