"""A data file as local bytes: `.gz`, `.zst` and remote objects are unpacked once into a temporary folder.

Enters: a path or URL. Leaves: random access to the plain bytes, from any process. A copy in another process uses the
unpacked bytes of the first if it can see them, else it makes its own (another machine), so a source may be sent
anywhere. What the bytes mean is not known here.
"""

from __future__ import annotations

import errno
import gzip
import logging
import os
import tempfile
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from vlm_stream.errors import ConfigError, SourceError, StorageError, hide_secrets, require
from vlm_stream.lifetimes import make_folder, remove_folder
from vlm_stream.sources.record import absolute, is_url
from vlm_stream.storage import StoreOptions, local_path, open_store, split_url

_LOG = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 16  # small, because packed bytes may stand for thousands of times as many
_FOLDER: Final = "vlm-stream-"
_REQUEST_BYTES: Final = 8 << 20
_MOST_OPEN: Final = 256
_opened: deque[weakref.ref[Any]] = deque()


def keep_open(file: Any) -> None:
    """Note that a file is open, and close the oldest: a dataset may have more files than a process may open."""
    _opened.append(weakref.ref(file))
    if len(_opened) > _MOST_OPEN and (other := _opened.popleft()()) is not None:
        other.close()


class _Handle:
    """An open file, closed once nobody uses it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY)
        os.pread(self.descriptor, 1, 0)  # a folder opens, but does not read
        stat = os.fstat(self.descriptor)
        self.size_bytes, self.stamp = stat.st_size, stat.st_mtime_ns

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class LocalFile:
    """Plain bytes of a local or spilled file, read at any offset. Picklable; opened where it is read."""

    def __init__(self, path: str, *, store: StoreOptions | None = None) -> None:
        """Make the plain bytes available; packed and remote files go to the temporary folder."""
        self.path = local_path(path) if path.startswith("file://") else path
        self._absolute = absolute(self.path)
        self._store = store
        self._spill: Path | None = None
        self._owner: weakref.finalize[..., Any] | None = None
        self._handle: _Handle | None = None
        self._handle = handle = self._open()
        self.size_bytes, self._stamp = handle.size_bytes, handle.stamp

    def read_at(self, begin: int, size_bytes: int) -> bytes:
        """Return the bytes of a range; a file that changed since it was scanned raises `SourceError`."""
        handle = self._handle or self._open()
        # A spill that this process made itself is younger than the first one, and equal to it.
        if handle.size_bytes != self.size_bytes or (handle.stamp != self._stamp and self._owner is None):
            raise SourceError(
                f"{self.path}: the file has changed since its records were located, so their places are wrong. "
                "Keep inputs still while they are converted, and start again."
            )
        self._handle = handle
        parts = []
        try:
            while size_bytes > 0 and (part := os.pread(handle.descriptor, size_bytes, begin)):
                parts.append(part)
                begin, size_bytes = begin + len(part), size_bytes - len(part)
        except OSError as error:
            raise SourceError(
                f"{self.path}: byte {begin:,} could not be read ({error.strerror or error}). Check the disk and the "
                "mount, and convert the same again to go on."
            ) from error
        if size_bytes:
            raise SourceError(
                f"{self.path}: the file became shorter while it was read: {size_bytes} bytes are missing before byte "
                f"{begin + size_bytes:,}. Keep inputs still while they are converted, and start again."
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def plain_path(self) -> Path:
        """Return the path of the plain bytes, which are made where this process finds none."""
        if not is_url(self.path) and not _decompressor(self.path):
            return Path(self._absolute)
        if self._spill is None or not self._spill.exists():
            self._spill, self._owner = _spill(self._absolute, self._store, self)
        return self._spill

    def stream(self) -> BinaryIO:
        """Return a new handle at the beginning of the plain bytes."""
        return self.plain_path().open("rb", buffering=0)

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        """The handle and the ownership of the spill stay in this process."""
        return {**self.__dict__, "_handle": None, "_owner": None}

    def _open(self) -> _Handle:
        try:
            handle = _Handle(self.plain_path())
        except OSError as error:
            raise _unreadable(self.path, error) from error
        keep_open(self)
        return handle


def plain_name(path: str) -> str:
    """Return the name without the suffix of its compression: `a.jsonl.gz` -> `a.jsonl`."""
    return path.removesuffix(".gz").removesuffix(".zst")


def _unreadable(path: str, error: OSError) -> SourceError:
    return SourceError(
        f"{path}: cannot be opened ({error.strerror or error}), so none of its records can be read. "
        "Check the path; in a meta file it is relative to that file."
    )


def _decompressor(path: str) -> Callable[[BinaryIO], Iterator[bytes]] | None:
    if path.endswith(".gz"):
        return _gunzip
    if path.endswith(".zst"):
        return _unzstd
    return None


def _pieces(raw: BinaryIO) -> Iterator[bytes]:
    while piece := raw.read(_PIECE_BYTES):
        yield piece


def _gunzip(raw: BinaryIO) -> Iterator[bytes]:
    yield from _pieces(cast("BinaryIO", gzip.GzipFile(fileobj=raw)))


def _unzstd(raw: BinaryIO) -> Iterator[bytes]:
    """Yield the plain bytes of one or more frames. The package's own reader takes a cut frame for a finished one."""
    zstandard = require("zstandard", "zstd", "Reading .zst files")
    frame = None
    try:
        for data in _pieces(raw):
            while data:
                frame = zstandard.ZstdDecompressor().decompressobj() if frame is None or frame.eof else frame
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise zlib.error(str(error)) from None
    if frame is not None and not frame.eof:
        raise EOFError("the last frame does not end")


def _spill(path: str, store: StoreOptions | None, owner: LocalFile) -> tuple[Path, weakref.finalize[..., Any]]:
    """Write the plain bytes into a new folder that goes away with its owner, or is removed by the next one."""
    try:
        folder = make_folder(_FOLDER)
    except OSError as error:
        raise ConfigError(
            f"there is no room to unpack {path}: the folder {tempfile.gettempdir()} cannot be written "
            f"({error.strerror}). Name another one by TMPDIR."
        ) from error
    finalizer = weakref.finalize(owner, _remove, folder, os.getpid())
    target = folder / "plain"
    decompress = _decompressor(path)
    try:
        packed = Path(path)
        if is_url(path):
            packed = folder / "packed" if decompress else target
            _download(path, packed, store)
        if decompress:
            with packed.open("rb") as raw, target.open("wb") as out:
                out.writelines(decompress(raw))
        if is_url(path) and decompress:
            packed.unlink()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        finalizer()
        raise _damaged(path, error) from error
    except OSError as error:
        finalizer()
        if error.errno == errno.ENOSPC:
            raise SourceError(
                f"{path}: the plain bytes do not fit into {folder.parent}, which is full, so no record can be read. "
                "Name a folder with more room by TMPDIR, or give the plain file."
            ) from error
        raise _unreadable(path, error) from error
    except BaseException:
        finalizer()
        raise
    _LOG.info("%s: %d plain bytes in %s", hide_secrets(path), target.stat().st_size, folder)
    return target, finalizer


def _damaged(path: str, error: Exception) -> SourceError:
    return SourceError(
        f"{path}: cannot be decompressed ({error}), so the file is cut off or damaged and none of its records are "
        "read. Fetch it again, or give the plain file."
    )


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked worker must not take the folder from its parent
        remove_folder(folder)


def _download(url: str, target: Path, store: StoreOptions | None) -> None:
    """Write a remote object into a file, one range after the other."""
    root, name = split_url(url)
    offset = 0
    try:
        opened = open_store(root, store)
        with target.open("wb") as out:
            while True:
                try:
                    data = opened.fetch(name, offset, _REQUEST_BYTES).data
                except StorageError:
                    if offset:
                        raise
                    out.write(opened.get(name))  # a web server without ranges; or nothing is there, and this says so
                    return
                out.write(data)
                offset += len(data)
                if len(data) < _REQUEST_BYTES:
                    return
    except (ConfigError, StorageError) as error:
        raise SourceError(
            f"{url}: cannot be fetched ({error}), so none of its records can be read. Check the URL and the "
            f"credentials, or copy the file first."
        ) from error
