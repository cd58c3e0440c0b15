"""A remote data file as a stream of bytes, through the storage room: its credentials, retries and limits apply."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, Final

from vlm_stream.errors import ConfigError, SourceError, StorageError
from vlm_stream.storage import open_store, split_url

if TYPE_CHECKING:
    from vlm_stream.storage import Store, StoreOptions

__all__ = ["open_remote"]

_REQUEST_BYTES: Final = 8 << 20


def open_remote(url: str, store: StoreOptions | None = None) -> BinaryIO:
    """Return the object's bytes as a readable stream; it is fetched while it is read.

    A web server that serves no ranges is asked for the whole file at once, which is then held in memory.
    """
    root, name = split_url(url)
    try:
        opened = open_store(root, store)
    except ConfigError as error:
        raise _cannot(url, error) from error
    try:
        first = opened.fetch(name, 0, _REQUEST_BYTES)
        if first.object_size is not None:
            return io.BufferedReader(_Ranges(opened, name, bytes(first.data)), 1 << 20)
    except StorageError:
        pass  # no ranges, or nothing there: the next request tells
    try:
        return io.BytesIO(opened.get(name))
    except StorageError as error:
        raise _cannot(url, error) from error


def _cannot(url: str, error: Exception) -> SourceError:
    return SourceError(
        f"{url}: cannot be fetched ({error}), so none of its records can be read. Check the URL and the credentials, "
        f"or copy the file first."
    )


class _Ranges(io.RawIOBase):
    """An object as a raw stream, one range after the other."""

    def __init__(self, store: Store, name: str, first: bytes) -> None:
        self._store = store
        self._name = name
        self._rest = memoryview(first)
        self._next = len(first)
        self._ended = len(first) < _REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest and not self._ended:
            try:
                data = self._store.fetch(self._name, self._next, _REQUEST_BYTES).data
            except StorageError as error:
                raise _cannot(f"{self._store.root}/{self._name}", error) from error
            self._rest = memoryview(data)
            self._next += len(data)
            self._ended = len(data) < _REQUEST_BYTES
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
