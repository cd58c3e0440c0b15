"""The one interface to bytes at rest, and the door that opens it: a URL in, a store out, chosen by scheme.

What a store knows: paths, bytes, sizes, etags. What it must not know: tars, samples, plans.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.storage.url import scheme_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from vlm_stream.storage.options import StoreOptions
    from vlm_stream.storage.values import ObjectInfo

__all__ = ["Buffer", "Fetched", "PutData", "Store", "open_store"]

Buffer: TypeAlias = bytes | bytearray | memoryview
PutData: TypeAlias = "bytes | bytearray | memoryview | IO[bytes] | os.PathLike[str]"

_REMOTE = ("s3", "gs", "az", "http", "https")


class Fetched(NamedTuple):
    """One range as it came, with what the store said of the whole object."""

    data: Buffer
    """Shorter than asked when the object ends before the range does."""
    object_size: int | None
    etag: str | None


@runtime_checkable
class Store(Protocol):
    """Objects under one root. Paths are relative to it, with `/` between names."""

    @property
    def root(self) -> str:
        """URL that `open_store` was given, without a slash at its end."""

    def get(self, path: str) -> bytes:
        """Return a whole object."""

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return the bytes of each `(offset, size)`, in that order; a range past the end comes short."""

    def fetch(self, path: str, offset: int, size: int) -> Fetched:
        """Return one range together with the object's size and etag."""

    def put(self, path: str, data: PutData) -> None:
        """Write an object: it appears whole or not at all. A `Path` is a local file to upload."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object whose path begins with `prefix`, sorted by path."""

    def head(self, path: str) -> ObjectInfo:
        """Return size and etag of one object."""

    def delete(self, path: str) -> None:
        """Remove one object; one that is not there is an error."""


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """Return the store at `url`; nothing is read yet, so this neither waits nor fails on the network.

    Args:
        url: A path, `file://`, `memory://name`, `s3://bucket/...`, `gs://bucket/...`, `az://container/...`,
            `http(s)://...` or `hf://datasets/owner/name...`.
        options: Endpoint, region, timeouts and such; local stores need none.
    """
    scheme = scheme_of(url)
    if scheme == "file":
        from vlm_stream.storage.local import LocalStore

        return LocalStore(url)
    if scheme == "memory":
        from vlm_stream.storage.memory import MemoryStore

        return MemoryStore(url)
    if scheme in _REMOTE:
        from vlm_stream.storage.remote import ObjectStore

        return ObjectStore(url, options)
    if scheme == "hf":
        from vlm_stream.storage.hub import HubStore

        return HubStore(url, options)
    known = ["file", "memory", "hf", *_REMOTE]
    raise ConfigError(f"No store is known for '{scheme}://' (in {url}): {nearest_name(scheme, known)}")
