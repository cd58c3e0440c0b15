"""Local files as a store: `pread` for ranges; temp + fsync + rename for writes.

Nothing is retried, because a local error does not go away by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_stream.errors import (
    NO_DESCRIPTORS,
    AccessError,
    ConfigError,
    NotFoundError,
    StorageError,
    say_no_descriptors,
)
from vlm_stream.storage.store import Fetched, ObjectInfo, Store, local_path

if TYPE_CHECKING:
    from collections.abc import Iterator

_TEMP_PREFIX = ".vlm-stream-"
_COPY_BYTES = 1 << 20
_NO_FILE = (errno.ENOENT, errno.ELOOP)
"""What a name in a folder leads to: a file that has gone, a link to nowhere or to itself."""


class LocalStore(Store):
    """A folder. Ranges are read without moving a file position, so threads and forked processes may share it."""

    def __init__(self, url: str) -> None:
        self.root = local_path(url)

    def __reduce__(self) -> tuple[type[LocalStore], tuple[str]]:
        return type(self), (self.root,)

    def get(self, path: str) -> bytes:
        with _translated(self.url(path)), FileIO(self._path(path)) as file:
            return file.readall()

    def fetch(self, path: str, offset: int, size: int) -> Fetched:
        """Do so. Local files have no etag: copies of a dataset must stay equal."""
        with _translated(self.url(path)), FileIO(self._path(path)) as file:
            there = os.fstat(file.fileno()).st_size
            # Memory is taken for what is there, not for what an index says.
            size = max(min(size, there - offset), 0)
            data = os.pread(file.fileno(), size, offset)
            # The kernel stops at 2 GB, network file systems where they like.
            while len(data) < size and (more := os.pread(file.fileno(), size - len(data), offset + len(data))):
                data += more
            return Fetched(data, there, None)

    def put(self, path: str, data: bytes | Path) -> None:
        """Write to a temporary file in the same folder, flush to disk, then rename over the target."""
        target = self._path(path)
        with _translated(self.url(path)):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.parent / f"{_TEMP_PREFIX}{secrets.token_hex(8)}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    if isinstance(data, bytes):
                        file.write(data)
                    else:
                        with data.open("rb") as source:
                            shutil.copyfileobj(source, file, _COPY_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(target.parent)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the files; unfinished writes are left out."""
        found: list[ObjectInfo] = []
        for folder, _, names in os.walk(self.root):
            for name in names:
                file = Path(folder, name)
                path = file.relative_to(self.root).as_posix()
                if path.startswith(prefix) and not name.startswith(_TEMP_PREFIX):
                    try:
                        found.append(ObjectInfo(path, file.stat().st_size, None))
                    except OSError as error:
                        if error.errno not in _NO_FILE:
                            raise
        yield from sorted(found, key=lambda info: info.path)

    def head(self, path: str) -> ObjectInfo:
        with _translated(self.url(path)):
            return ObjectInfo(path, self._path(path).stat().st_size, None)

    def delete(self, path: str) -> None:
        with _translated(self.url(path)):
            self._path(path).unlink()

    def _path(self, path: str) -> Path:
        return Path(self.root, self.check_path(path))


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
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no file {url}. Check the path, and that the disk is mounted here.") from error
    except NotADirectoryError as error:
        raise NotFoundError(
            f"There is no {url}, because a part of that path is a file and not a folder. Give the folder that holds it."
        ) from error
    except PermissionError as error:
        raise AccessError(f"{url} may not be opened by this user ({error.strerror}). Check its mode.") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise NotFoundError(f"There is no file {url!r}, because that is no path ({error}). Check the path.") from error
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise StorageError(say_no_descriptors(f"{url} could not be opened")) from error
        hint = "Free some space." if error.errno == errno.ENOSPC else "Check the disk and the mount."
        raise StorageError(f"{url} could not be read or written: {error.strerror or error}. {hint}") from error
