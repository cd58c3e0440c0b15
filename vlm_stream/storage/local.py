"""Local files as a store: `pread` for ranges, temp + fsync + rename for writes.

Enters: paths and ranges. Leaves: bytes. It must not know samples or requests; nothing is retried, because a local error
does not go away by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections import OrderedDict
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import AccessError, ConfigError, NotFoundError, StorageError
from vlm_stream.storage.store import Buffer, Fetched, PutData
from vlm_stream.storage.url import check_path, join_url, local_path
from vlm_stream.storage.values import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LocalStore"]

_MAX_OPEN_FILES = 128
_TEMP_PREFIX = ".vlm-stream-"
_COPY_BYTES = 1 << 20


class _OpenFile:
    """A descriptor that is closed when the last one who reads it lets go."""

    __slots__ = ("descriptor",)

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class LocalStore:
    """A folder. Ranges are read without moving a file position, so threads and forked processes may share it."""

    def __init__(self, url: str) -> None:
        """Remember where the folder is; it need not exist before the first write."""
        self._folder = local_path(url)
        self._open_files: OrderedDict[str, _OpenFile] = OrderedDict()

    @property
    def root(self) -> str:
        """Return the absolute path of the folder."""
        return self._folder

    def __reduce__(self) -> tuple[type[LocalStore], tuple[str]]:
        """Travel to another process as a path alone."""
        return type(self), (self._folder,)

    def get(self, path: str) -> bytes:
        """Return a whole file."""
        with _translated(self.url(path)), FileIO(join_url(self._folder, check_path(self._folder, path))) as file:
            return file.readall()

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return the bytes of each `(offset, size)`."""
        return [self.fetch(path, offset, size).data for offset, size in ranges]

    def fetch(self, path: str, offset: int, size: int) -> Fetched:
        """Return one range and the file's size. Local files have no etag: copies of a dataset must stay equal."""
        try:
            file = self._open(path)  # held by name: the last reader closes it
            data = os.pread(file.descriptor, size, offset)
            if len(data) < size:
                data = _read_rest(file.descriptor, data, offset, size)
            return Fetched(data, os.fstat(file.descriptor).st_size, None)
        except OSError as error:
            raise _error_of(error, self.url(path)) from error

    def put(self, path: str, data: PutData) -> None:
        """Write beside the target, flush to disk, then rename over it."""
        target = self._path(path)
        with _translated(self.url(path)):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.parent / f"{_TEMP_PREFIX}{secrets.token_hex(8)}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    _copy_into(file, data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(target.parent)
        self._open_files.pop(path, None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the files whose path begins with `prefix`, sorted; unfinished writes are left out."""
        found: list[ObjectInfo] = []
        for folder, _, names in os.walk(self._folder):
            for name in names:
                file = Path(folder, name)
                path = file.relative_to(self._folder).as_posix()
                if path.startswith(prefix) and not name.startswith(_TEMP_PREFIX):
                    with contextlib.suppress(FileNotFoundError):
                        found.append(ObjectInfo(path, file.stat().st_size, None))
        yield from sorted(found, key=lambda info: info.path)

    def head(self, path: str) -> ObjectInfo:
        """Return the file's size."""
        with _translated(self.url(path)):
            return ObjectInfo(path, self._path(path).stat().st_size, None)

    def delete(self, path: str) -> None:
        """Remove the file."""
        with _translated(self.url(path)):
            self._path(path).unlink()
        self._open_files.pop(path, None)

    def url(self, path: str) -> str:
        """Return the path as messages name it."""
        return join_url(self._folder, path)

    def _path(self, path: str) -> Path:
        return Path(self._folder, check_path(self._folder, path))

    def _open(self, path: str) -> _OpenFile:
        # Without a lock, which a fork could leave locked: each step is atomic, and to open a file twice does no harm.
        file = self._open_files.get(path)
        if file is None:
            file = self._open_files[path] = _OpenFile(join_url(self._folder, check_path(self._folder, path)))
        try:
            self._open_files.move_to_end(path)
            if len(self._open_files) > _MAX_OPEN_FILES:
                self._open_files.popitem(last=False)
        except KeyError:
            pass
        return file


def _read_rest(descriptor: int, data: bytes, offset: int, size: int) -> bytes:
    """Finish a short read: the kernel stops at 2 GB, network file systems where they like, the end of file for good."""
    parts = [data]
    num_read = len(data)
    while num_read < size and parts[-1]:
        parts.append(os.pread(descriptor, size - num_read, offset + num_read))
        num_read += len(parts[-1])
    return b"".join(parts)


def _copy_into(file: Any, data: PutData) -> None:
    """Write bytes, a stream or a local file into an open file."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        file.write(data)
    elif isinstance(data, os.PathLike):
        with Path(data).open("rb") as source:
            shutil.copyfileobj(source, file, _COPY_BYTES)
    elif hasattr(data, "read"):
        shutil.copyfileobj(data, file, _COPY_BYTES)
    else:
        raise ConfigError(
            f"put() was given {type(data).__name__}, which holds no bytes; give bytes, a binary file or a Path."
        )


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turn what the operating system says into the error tree."""
    try:
        yield
    except OSError as error:
        raise _error_of(error, url) from error


def _error_of(error: OSError, url: str) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"There is no file {url}. Check the path, and that the disk is mounted here.")
    if isinstance(error, PermissionError):
        return AccessError(f"{url} may not be opened by this user ({error.strerror}). Check its mode.")
    hint = "Free some space." if error.errno == errno.ENOSPC else "Check the disk and the mount."
    return StorageError(f"{url} could not be read or written: {error.strerror or error}. {hint}")
