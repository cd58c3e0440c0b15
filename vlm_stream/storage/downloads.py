"""The node cache of one reader: requests served from it, whole shards brought into it in parallel parts.

Of each store, one process of the node also brings shards that will be needed soon, as far as there is room beside those
that are needed sooner.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Final

from vlm_stream.errors import ChangedObjectError, StorageError
from vlm_stream.storage.cache import CachedShard, FullError, NodeCache, NoRoomError, cache_folder, try_lock
from vlm_stream.storage.spans import ShardKey, check_unchanged_object
from vlm_stream.storage.store import Fetched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from vlm_stream.storage.options import ReadOptions
    from vlm_stream.storage.reader import ReadMetrics
    from vlm_stream.storage.spans import RangeRequest
    from vlm_stream.storage.store import Store

_log = logging.getLogger(__name__)
_PART_BYTES: Final = 2 * 1024 * 1024
# Few, so that the first to be needed is whole early.
_SHARDS_AT_A_TIME: Final = 4
_PARTS_AHEAD: Final = 4
"""Of a shard that nobody waits for."""
_AHEAD_S: Final = 300.0
"""How early a shard is brought."""
_LOOK_S: Final = 2.0
_FULL_S: Final = 2.0
"""For how long a full cache is not asked for room: to look for it takes a look at all of its files."""
_JOIN_S: Final = 5.0


class ShardDownloads:
    """The cache of one reader: requests served from it, whole shards brought into it in parallel parts."""

    def __init__(
        self,
        options: ReadOptions,
        metrics: ReadMetrics,
        fetch: Callable[[Store, str, int, int], Future[Fetched]],
        sleep: Callable[[float], None],
        stores: Mapping[str, Store],
    ) -> None:
        """Open nothing yet; `fetch` starts one range of a store, `sleep` waits, or raises when the reader is closed.

        `stores` are those that the reader has opened, by root.
        """
        self._cache = NodeCache(options.cache_dir or "", options.cache_bytes or 0)
        self._metrics = metrics
        self._fetch = fetch
        self._sleep = sleep
        self._stores = stores
        self._folder = cache_folder(options.cache_dir or "")
        self._part_bytes = min(_PART_BYTES, options.max_request_bytes)
        self._max_parts = options.max_inflight
        self._slots = threading.Semaphore(_SHARDS_AT_A_TIME)
        self._sizes: dict[tuple[str, str], int] = {}
        self._disk_failed = False
        self._full_until = 0.0
        self._warned: set[str] = set()
        self._ahead: threading.Thread | None = None
        self._starting = threading.Lock()

    def read(self, store: Store, request: RangeRequest) -> Fetched | None:
        """Return the request's bytes from the cache, or None when it cannot take the shard: read the store then."""
        key = self._key(store, request)
        with self._starting:
            if self._ahead is None:
                self._ahead = threading.Thread(target=self._run_ahead, name="vlm-stream-ahead", daemon=True)
                self._ahead.start()
        try:
            shard = self._cache.find(key)
            downloaded = False
            if shard is None:
                if self._disk_failed or time.monotonic() < self._full_until or self._is_past(key):
                    return None
                shard, downloaded = self._obtain(store, key)
        except NoRoomError as error:
            if isinstance(error, FullError):
                self._full_until = time.monotonic() + _FULL_S
            self._warn_once("room", f"{error}. Such shards are read from the store each time; raise cache_bytes.")
            return None
        except ChangedObjectError:
            return None  # who reads the range itself can tell a shard that was cut from one that was replaced
        except OSError as error:
            self._disk_failed = True
            self._warn_once("disk", f"{error.strerror or error}. Shards that are not in it are read from the store.")
            return None
        try:
            self._metrics.add(cache_downloads=int(downloaded), cache_hits=int(not downloaded))
            return Fetched(shard.read(request.offset, request.size), key.size, request.etag)
        finally:
            shard.close()

    def discard(self, store: Store, request: RangeRequest) -> None:
        """Remove a shard that holds wrong bytes."""
        try:
            self._cache.discard(self._key(store, request))
        except OSError as error:
            self._warn_once("discard", f"{error.strerror or error}. A damaged shard could not be removed from it.")

    def close(self) -> None:
        """Wait until nothing is brought any more; `sleep` raises by now."""
        if self._ahead is not None:
            self._ahead.join(_JOIN_S)

    def _obtain(self, store: Store, key: ShardKey) -> tuple[CachedShard, bool]:
        while not self._slots.acquire(timeout=0.1):
            self._sleep(0)
        try:
            return self._cache.obtain(key, partial(self._download, store, key), self._sleep)
        finally:
            self._slots.release()

    def _is_past(self, key: ShardKey) -> bool:
        """Tell whether this is a last sample of a shard that is not needed again soon, and so not worth a download."""
        seconds = self._cache.foresight.due().seconds(key.digest.hex())
        return seconds is not None and seconds > _AHEAD_S

    def _run_ahead(self) -> None:
        """Bring what will be needed of those stores of which this process is the one of the node that does."""
        mine: dict[str, Store] = {}
        with contextlib.suppress(OSError, CancelledError), contextlib.ExitStack() as locks:
            self._folder.mkdir(parents=True, exist_ok=True)
            while True:
                self._sleep(_LOOK_S)
                for root, store in list(self._stores.items()):
                    if root in mine or not hasattr(store, "fetch_async"):  # shards on this machine are not cached
                        continue
                    # One lock for each store: other jobs read stores that this process cannot open.
                    lock = (self._folder / f"{ShardKey(root, '', 0, None).digest.hex()}.ahead").open("ab")
                    if try_lock(lock.fileno()):
                        mine[root] = store
                        locks.enter_context(lock)
                    else:
                        lock.close()
                self._bring_ahead(mine)

    def _bring_ahead(self, stores: Mapping[str, Store]) -> None:
        for key in self._cache.foresight.due().coming(_AHEAD_S):
            store = stores.get(key.root)
            if store is None or self._cache.has(key):
                continue
            try:
                download = partial(self._download, store, key, max_parts=_PARTS_AHEAD)
                shard, downloaded = self._cache.obtain(key, download, self._sleep)
            except NoRoomError:
                return
            except (StorageError, ChangedObjectError):  # said where it is read
                continue
            shard.close()
            self._metrics.add(cache_downloads=int(downloaded))
            self._sleep(0)

    def _key(self, store: Store, request: RangeRequest) -> ShardKey:
        size = request.shard_size
        if size is None:
            place = (request.root, request.path)
            if place not in self._sizes:
                self._sizes[place] = store.head(request.path).size
            size = self._sizes[place]
        return ShardKey(request.root, request.path, size, request.etag)

    def _download(self, store: Store, key: ShardKey, descriptor: int, *, max_parts: int | None = None) -> None:
        """Write all parts of a shard, with a bounded number of them under way."""
        under_way: deque[tuple[int, int, Future[Fetched]]] = deque()
        try:
            for begin in range(0, key.size, self._part_bytes):
                if len(under_way) >= (max_parts or self._max_parts):
                    _write_part(store.url(key.path), key, descriptor, under_way.popleft())
                size = min(self._part_bytes, key.size - begin)
                under_way.append((begin, size, self._fetch(store, key.path, begin, size)))
            while under_way:
                _write_part(store.url(key.path), key, descriptor, under_way.popleft())
        finally:
            for _, _, future in under_way:
                future.cancel()

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("The node cache goes on without some shards: %s", message)


def _write_part(url: str, key: ShardKey, descriptor: int, part: tuple[int, int, Future[Fetched]]) -> None:
    begin, size, future = part
    fetched = future.result()
    check_unchanged_object(url, (key.size, key.etag), fetched)
    if len(fetched.data) != size:
        raise StorageError(f"{url} ended at byte {begin + len(fetched.data)} of {key.size}.")
    view = memoryview(fetched.data)
    while view:
        num_written = os.pwrite(descriptor, view, begin)
        view, begin = view[num_written:], begin + num_written
