"""One object from front to back: read in large requests, one ahead, with a checksum on the way.

Enters: a store and a path. Leaves: as many bytes as asked for, in order, and at the end the crc32c of all. What the
bytes mean is not known here.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import crc32c

if TYPE_CHECKING:
    from types import TracebackType

    from vlm_stream.storage.store import Store

__all__ = ["ObjectReader"]

_REQUEST_BYTES: Final = 8 << 20


class ObjectReader:
    """Reads an object sequentially; use it in a `with` block."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        """Start at the first of the object's `size` bytes."""
        self.size = size
        self.position = 0
        self._store = store
        self._path = path
        self._crc = 0
        self._chunk = b""
        self._used = 0
        self._asked = 0
        self._pool = ThreadPoolExecutor(1)
        self._next: Future[bytes] | None = None
        self._ask()

    def __enter__(self) -> ObjectReader:
        """Return the reader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end of the object."""
        parts = []
        while size > 0:
            if self._used == len(self._chunk) and not self._advance():
                break
            part = self._chunk[self._used : self._used + size]
            self._used += len(part)
            self.position += len(part)
            size -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip_to(self, offset: int) -> None:
        """Read on up to `offset`, which lies ahead."""
        while self.position < offset and self.read(min(offset - self.position, _REQUEST_BYTES)):
            pass

    def finish(self) -> int:
        """Read what is left; return the crc32c of the whole object."""
        while self._advance():
            self.position += len(self._chunk)
        return self._crc

    def _ask(self) -> None:
        """Start the next request, so that it is under way while this chunk is worked on."""
        size = min(_REQUEST_BYTES, self.size - self._asked)
        self._next = self._pool.submit(self._fetch, self._asked, size) if size > 0 else None
        self._asked += max(size, 0)

    def _fetch(self, offset: int, size: int) -> bytes:
        return bytes(self._store.fetch(self._path, offset, size).data)

    def _advance(self) -> bool:
        if self._next is None:
            return False
        self._chunk = self._next.result()
        self._used = 0
        self._crc = crc32c.crc32c(self._chunk, self._crc)
        self._ask()
        return bool(self._chunk)
