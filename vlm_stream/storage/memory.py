"""Objects in this process's memory, for tests: `memory://name` is one shared dict per name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_stream.errors import ConfigError, NotFoundError
from vlm_stream.storage.store import Buffer, Fetched, PutData
from vlm_stream.storage.url import check_path, join_url
from vlm_stream.storage.values import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MemoryStore"]

_STORES: dict[str, dict[str, bytes]] = {}


class MemoryStore:
    """A dict of objects. Two stores with one URL see the same objects; another process sees a copy, or none."""

    def __init__(self, url: str) -> None:
        """Open the dict of that name."""
        self._root = url.rstrip("/") if not url.endswith("://") else url
        self._objects = _STORES.setdefault(self._root, {})

    @property
    def root(self) -> str:
        """Return the URL."""
        return self._root

    def __reduce__(self) -> tuple[type[MemoryStore], tuple[str]]:
        """Travel as a name: objects stay where they are."""
        return type(self), (self._root,)

    def get(self, path: str) -> bytes:
        """Return a whole object."""
        try:
            return self._objects[check_path(self._root, path)]
        except KeyError:
            url = join_url(self._root, path)
            raise NotFoundError(f"There is no object {url} in this process's memory. Put it there first.") from None

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return the bytes of each `(offset, size)`."""
        return [self.fetch(path, offset, size).data for offset, size in ranges]

    def fetch(self, path: str, offset: int, size: int) -> Fetched:
        """Return one range with size and etag."""
        data = self.get(path)
        return Fetched(memoryview(data)[offset : offset + size], len(data), _etag(data))

    def put(self, path: str, data: PutData) -> None:
        """Keep a copy of the data."""
        if isinstance(data, os.PathLike):
            content = Path(data).read_bytes()
        elif isinstance(data, (bytes, bytearray, memoryview)):
            content = bytes(data)
        elif hasattr(data, "read"):
            content = data.read()
        else:
            raise ConfigError(
                f"put() was given {type(data).__name__}, which holds no bytes; give bytes, a binary file or a Path."
            )
        self._objects[check_path(self._root, path)] = content

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose path begins with `prefix`, sorted."""
        for path in sorted(self._objects):
            if path.startswith(prefix):
                yield self.head(path)

    def head(self, path: str) -> ObjectInfo:
        """Return size and etag."""
        data = self.get(path)
        return ObjectInfo(path, len(data), _etag(data))

    def delete(self, path: str) -> None:
        """Remove one object."""
        self.get(path)
        del self._objects[path]


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
