"""The node cache: whole shards of remote stores on a local disk, shared by every process of a node.

    <cache_dir>/vlm-stream-cache-1/<key>.part     being downloaded; its writer holds an exclusive flock on it
    <cache_dir>/vlm-stream-cache-1/<key>.shard    complete; its readers hold a shared flock on it

The locks are on the data files themselves and live in the kernel, so they end with their process. A `.part` that no
process holds belongs to a dead writer and is started over. A complete file ends with a trailer that names its key and
size and is written last; a file without it was not written here, and is neither served nor deleted. Two jobs may share
the folder, each under its own limit of bytes. `NodeCache` keeps the files; `ShardDownloads` serves requests from them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_stream.errors import ChangedObjectError, StorageError
from vlm_stream.storage.spans import check_unchanged_object
from vlm_stream.storage.store import Fetched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from vlm_stream.storage.options import ReadOptions
    from vlm_stream.storage.reader import ReadMetrics
    from vlm_stream.storage.spans import RangeRequest
    from vlm_stream.storage.store import Store

_log = logging.getLogger(__name__)
_PART_BYTES = 2 * 1024 * 1024
# Few, so that the first to be needed is whole early.
_SHARDS_AT_A_TIME = 4
_FOLDER = "vlm-stream-cache-1"
_NAME = re.compile(r"[0-9a-f]{64}\.(shard|part)")
_TRAILER = struct.Struct("<16sQ32s")
_MAGIC = b"vlm-stream-shard"
_STALLED_S = 30.0


class NoRoomError(Exception):
    """The shard does not fit beside those that are in use."""


@dataclass(frozen=True, slots=True)
class ShardKey:
    """Which version of which shard."""

    root: str
    path: str
    size: int
    etag: str | None

    @property
    def digest(self) -> bytes:
        """Return the name under which the shard is kept."""
        text = "\0".join((self.root, self.path, str(self.size), (self.etag or "").strip('"')))
        return hashlib.sha256(text.encode()).digest()


class CachedShard:
    """A complete shard, open for reading; while it is, it is not evicted."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size

    def read(self, offset: int, size: int) -> bytes:
        """Return one range."""
        return os.pread(self._descriptor, min(size, self._size - offset), offset)

    def close(self) -> None:
        """Close; the lock ends with the descriptor."""
        os.close(self._descriptor)


class NodeCache:
    """Shards on disk under a limit of bytes. Safe for any number of threads and processes."""

    def __init__(self, folder: str, max_bytes: int, min_idle_s: float = 60.0) -> None:
        """Name the folder; it is made at the first download.

        Args:
            folder: On a local disk: the locks of network file systems are not good enough.
            max_bytes: Limit for all files of the cache together.
            min_idle_s: Shards used more recently are not evicted, so a cache that is too small for the shards in
                play serves some of them well instead of downloading all of them again and again.
        """
        self._folder = Path(folder).expanduser() / _FOLDER
        self._max_bytes = max_bytes
        self._min_idle_s = min_idle_s

    def find(self, key: ShardKey) -> CachedShard | None:
        """Return the shard if it is here, and note its use."""
        try:
            descriptor = os.open(self._file(key, "shard"), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        # Only an evictor holds this exclusively, and only for a moment. Should it win, the open file stays readable.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not _is_whole(descriptor, key.digest, key.size):
            os.close(descriptor)
            return None
        with contextlib.suppress(PermissionError):  # another user's download is served all the same
            os.utime(descriptor)
        return CachedShard(descriptor, key.size)

    def obtain(
        self, key: ShardKey, download: Callable[[int], None], wait: Callable[[float], None]
    ) -> tuple[CachedShard, bool]:
        """Return the shard and whether it was downloaded by this very call; others' downloads are waited for.

        Args:
            key: Which shard.
            download: Writes the whole shard into the descriptor that it is given.
            wait: Sleeps; may raise to end the waiting.

        Raises:
            NoRoomError: It does not fit; read the store instead.
            OSError: The disk is full or fails; read the store instead.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            found = self.find(key)
            if found is not None:
                return found, False
            descriptor = self._lock_part(key)
            if descriptor is None:
                self._check_alive(key)
                wait(0.02)
                continue
            found = self.find(key)  # the last writer may have finished between our look and our lock
            if found is not None:
                self._file(key, "part").unlink(missing_ok=True)
                os.close(descriptor)
                return found, False
            return self._fill(key, descriptor, download), True

    def discard(self, key: ShardKey) -> None:
        """Remove a shard whose bytes turned out to be wrong."""
        found = self.find(key)
        if found is not None:
            self._file(key, "shard").unlink(missing_ok=True)
            found.close()

    def _fill(self, key: ShardKey, descriptor: int, download: Callable[[int], None]) -> CachedShard:
        part = self._file(key, "part")
        try:
            self._make_room(key, descriptor)
            download(descriptor)
            os.pwrite(descriptor, _TRAILER.pack(_MAGIC, key.size, key.digest), key.size)
            # Under the lock: a process that counts the files meanwhile would miss the one that changes its name.
            with self._locked_folder():
                part.rename(self._file(key, "shard"))
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except BaseException:
            # The lock is held: no other process can be writing to this path.
            part.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return CachedShard(descriptor, key.size)

    def _lock_part(self, key: ShardKey) -> int | None:
        """Return the locked descriptor of an empty part file, or None while another writer holds it."""
        path = self._file(key, "part")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _try_lock(descriptor):
            with contextlib.suppress(FileNotFoundError):
                # The file may have been renamed or removed between opening and locking.
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    os.ftruncate(descriptor, 0)
                    return descriptor
        os.close(descriptor)
        return None

    def _check_alive(self, key: ShardKey) -> None:
        """Raise when the writer that we wait for has not written for long: its lock may live on in a forked child."""
        with contextlib.suppress(FileNotFoundError):
            if time.time() - self._file(key, "part").stat().st_mtime > _STALLED_S:
                raise NoRoomError(f"the process that downloads {key.path} has not written for {_STALLED_S:.0f} s")

    def _make_room(self, key: ShardKey, descriptor: int) -> None:
        """Evict until the shard fits, and reserve its place by the length of the file."""
        needed = key.size + _TRAILER.size
        if needed > self._max_bytes:
            raise NoRoomError(f"{key.path} has {key.size} bytes, more than cache_bytes = {self._max_bytes}")
        with self._locked_folder():
            entries = sorted(self._entries(), key=lambda entry: entry[2])
            excess = sum(size for _, size, _ in entries) + needed - self._max_bytes
            newest = time.time() - self._min_idle_s
            for path, size, used_s in entries:
                if excess <= 0:
                    break
                if path.suffix == ".shard" and used_s <= newest and _remove_unused(path):
                    excess -= size
            if excess > 0:
                raise NoRoomError(
                    f"the shards in use fill cache_bytes = {self._max_bytes}; it should hold those of one shuffle group"
                )
            os.ftruncate(descriptor, needed)

    def _entries(self) -> Iterator[tuple[Path, int, float]]:
        """Yield path, bytes and time of last use of what the cache wrote; remove what dead writers left."""
        for path in self._folder.iterdir():
            if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_file():
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.suffix == ".part" and _remove_unused(path):
                    continue
                found = path.stat()
                yield path, found.st_size, found.st_mtime

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """Keep two processes from filling the same free place."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # Not only closed: a process that was forked meanwhile has it open too, and would keep it locked.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _file(self, key: ShardKey, kind: str) -> Path:
        return self._folder / f"{key.digest.hex()}.{kind}"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_whole(descriptor: int, digest: bytes, size: int) -> bool:
    """Return whether the file carries the trailer of that shard at its very end."""
    if os.fstat(descriptor).st_size != size + _TRAILER.size:
        return False
    return os.pread(descriptor, _TRAILER.size, size) == _TRAILER.pack(_MAGIC, size, digest)


def _remove_unused(path: Path) -> bool:
    """Remove a part that no process writes, or a complete shard that none reads and that is one of ours."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size - _TRAILER.size
        ours = path.suffix == ".part" or (size >= 0 and _is_whole(descriptor, bytes.fromhex(path.stem), size))
        if not (ours and _try_lock(descriptor)):
            return False
        path.unlink()
        return True
    finally:
        os.close(descriptor)


class ShardDownloads:
    """The cache of one reader: requests served from it, whole shards brought into it in parallel parts."""

    def __init__(
        self,
        options: ReadOptions,
        metrics: ReadMetrics,
        fetch: Callable[[Store, str, int, int], Future[Fetched]],
        sleep: Callable[[float], None],
    ) -> None:
        """Open nothing yet; `fetch` starts one range of a store, `sleep` waits, or raises when the reader is closed."""
        self._cache = NodeCache(options.cache_dir or "", options.cache_bytes or 0)
        self._metrics = metrics
        self._fetch = fetch
        self._sleep = sleep
        self._part_bytes = min(_PART_BYTES, options.max_request_bytes)
        self._max_parts = options.max_inflight
        self._slots = threading.Semaphore(_SHARDS_AT_A_TIME)
        self._sizes: dict[tuple[str, str], int] = {}
        self._disk_failed = False
        self._warned: set[str] = set()

    def read(self, store: Store, request: RangeRequest) -> Fetched | None:
        """Return the request's bytes from the cache, or None when it cannot take the shard: read the store then."""
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

    def _obtain(self, store: Store, key: ShardKey) -> tuple[CachedShard, bool]:
        while not self._slots.acquire(timeout=0.1):
            self._sleep(0)
        try:
            return self._cache.obtain(key, lambda descriptor: self._download(store, key, descriptor), self._sleep)
        finally:
            self._slots.release()

    def _key(self, store: Store, request: RangeRequest) -> ShardKey:
        size = request.shard_size
        if size is None:
            place = (request.root, request.path)
            if place not in self._sizes:
                self._sizes[place] = store.head(request.path).size
            size = self._sizes[place]
        return ShardKey(request.root, request.path, size, request.etag)

    def _download(self, store: Store, key: ShardKey, descriptor: int) -> None:
        """Write all parts of a shard, with a bounded number of them under way."""
        under_way: deque[tuple[int, int, Future[Fetched]]] = deque()
        try:
            for begin in range(0, key.size, self._part_bytes):
                if len(under_way) >= self._max_parts:
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
