"""A remote data file as a stream of bytes, through the one client for every store."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from vlm_stream.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

__all__ = ["open_remote"]


def open_remote(url: str) -> BinaryIO:
    """Return the object's bytes as a readable stream; it is fetched while it is read."""
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    folder, _, name = url.rpartition("/")
    try:
        result = obstore.get(from_url(folder, client_options={"allow_http": url.startswith("http://")}), name)
    except (BaseError, FileNotFoundError, PermissionError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(
            f"{url}: cannot be fetched ({first_line}), so none of its records can be read. "
            "Check the URL and the credentials."
        ) from error
    return io.BufferedReader(_Chunks(iter(result), url), 1 << 20)


class _Chunks(io.RawIOBase):
    """An iterator of byte chunks as a raw stream."""

    def __init__(self, chunks: Iterator[object], url: str) -> None:
        self._url = url
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            try:
                chunk = next(self._chunks, None)
            except Exception as error:  # the client's errors have no common base that stays the same over versions
                raise SourceError(
                    f"{self._url}: the download broke off ({str(error).strip().splitlines()[0]}), so its records "
                    "cannot be read. Try again, or copy the file first."
                ) from error
            if chunk is None:
                return 0
            self._rest = memoryview(bytes(chunk))  # type: ignore[call-overload]
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
