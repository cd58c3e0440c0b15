"""The node cache: whole shards of remote stores on a local disk, shared by every process of a node.

    <cache_dir>/vlm-stream-cache-1/<key>.part     being downloaded; its writer holds an exclusive flock on it
    <cache_dir>/vlm-stream-cache-1/<key>.shard    complete; its readers hold a shared flock on it

The locks are on the data files themselves and live in the kernel, so they end with their process. A `.part` that no
process holds belongs to a dead writer and is started over. A complete file ends with a trailer that names its key and
size and is written last; a file without it was not written here, and is neither served nor deleted. Two jobs may share
the folder, each under its own limit of bytes.

What is evicted is what is needed last, as far as jobs of the node say what they will read (`foresight.py`); of other
shards the least recently used one goes first.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_stream.storage.foresight import Foresight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlm_stream.storage.spans import ShardKey

_FOLDER = "vlm-stream-cache-1"
_NAME = re.compile(r"[0-9a-f]{64}\.(shard|part)")
_TRAILER = struct.Struct("<16sQ32s")
_MAGIC = b"vlm-stream-shard"
_STALLED_S = 30.0


def cache_folder(cache_dir: str) -> Path:
    """Return where the cache keeps its files."""
    return Path(cache_dir).expanduser() / _FOLDER


class NoRoomError(Exception):
    """The shard does not fit."""


class FullError(NoRoomError):
    """It does not fit beside those that are in use, as no other of its size would."""


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
            min_idle_s: Shards of which no job speaks and that were used more recently are not evicted, so a cache
                that is too small for the shards in play serves some of them well instead of downloading all of them
                again and again.
        """
        self._folder = cache_folder(folder)
        self.foresight = Foresight(self._folder)
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
        written, since = 0.0, time.monotonic()
        while True:
            found = self.find(key)
            if found is not None:
                return found, False
            descriptor = self._lock_part(key)
            if descriptor is None:
                if (latest := self._written_at(key)) != written:
                    written, since = latest, time.monotonic()
                if time.monotonic() - since > _STALLED_S:  # its lock may live on in a forked child
                    raise NoRoomError(f"the process that downloads {key.path} has not written for {_STALLED_S:.0f} s")
                wait(0.02)
                continue
            found = self.find(key)  # the last writer may have finished between our look and our lock
            if found is not None:
                self._file(key, "part").unlink(missing_ok=True)
                os.close(descriptor)
                return found, False
            return self._fill(key, descriptor, download), True

    def has(self, key: ShardKey) -> bool:
        """Tell whether the shard is here, without using it."""
        return self._file(key, "shard").exists()

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
        if try_lock(descriptor):
            with contextlib.suppress(FileNotFoundError):
                # The file may have been renamed or removed between opening and locking.
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    os.ftruncate(descriptor, 0)
                    return descriptor
        os.close(descriptor)
        return None

    def _written_at(self, key: ShardKey) -> float:
        """Return when a download was last written to, by the clock of the file system: only its changes count."""
        with contextlib.suppress(FileNotFoundError):
            return self._file(key, "part").stat().st_mtime
        return 0.0

    def _make_room(self, key: ShardKey, descriptor: int) -> None:
        """Evict until the shard fits, and reserve its place by the length of the file."""
        needed = key.size + _TRAILER.size
        if needed > self._max_bytes:
            raise NoRoomError(f"{key.path} has {key.size} bytes, more than cache_bytes = {self._max_bytes}")
        with self._locked_folder():
            due = self.foresight.due()
            wanted_in_s = due.seconds(key.digest.hex()) or 0.0
            entries = []
            excess = needed - self._max_bytes
            for path, size, used_s in self._entries():
                excess += size
                due_in_s = due.seconds(path.stem)
                # A clock that was set back has left uses in the future: these are no newer than others.
                is_idle = abs(time.time() - used_s) >= self._min_idle_s
                if path.suffix == ".shard" and (is_idle if due_in_s is None else due_in_s > wanted_in_s):
                    entries.append((-math.inf if due_in_s is None else -due_in_s, used_s, path, size))
            for _, _, path, size in sorted(entries):
                if excess <= 0:
                    break
                if _remove_unused(path):
                    excess -= size
            if excess > 0:
                raise FullError(
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


def try_lock(descriptor: int) -> bool:
    """Lock a file for this process alone; False: it is locked."""
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
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # somebody has found wrong bytes in it meanwhile
        return True
    try:
        size = os.fstat(descriptor).st_size - _TRAILER.size
        ours = path.suffix == ".part" or (size >= 0 and _is_whole(descriptor, bytes.fromhex(path.stem), size))
        if not (ours and try_lock(descriptor)):
            return False
        path.unlink()
        return True
    finally:
        os.close(descriptor)
