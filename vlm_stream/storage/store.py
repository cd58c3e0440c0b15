"""URLs, the one interface to bytes at rest, and `open_store`: a URL in, a store out, chosen by scheme.

A store knows paths, bytes, sizes and etags. It must not know tars, samples or plans.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from vlm_stream.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vlm_stream.storage.options import StoreOptions

__all__ = [
    "Buffer",
    "Fetched",
    "ObjectInfo",
    "PutData",
    "Store",
    "check_put",
    "join_url",
    "local_path",
    "open_store",
    "scheme_of",
    "split_url",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
PutData: TypeAlias = "bytes | bytearray | memoryview | IO[bytes] | os.PathLike[str]"

_REMOTE = ("s3", "gs", "az", "http", "https")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def scheme_of(url: str) -> str:
    """Return the scheme in lower case, `file` for plain paths.

    >>> scheme_of("S3://bucket/data"), scheme_of("/data/set")
    ('s3', 'file')
    """
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else "file"


def local_path(url: str) -> str:
    """Return the absolute path that a plain path or a `file://` URL names."""
    if _SCHEME.match(url):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(
                f"{url} names the host '{parts.netloc}', so it cannot be read as a local file. "
                f"Write three slashes for a local path: file:///{parts.netloc}{parts.path}"
            )
        return str(Path(unquote(parts.path)).absolute())
    path = Path(url)
    return str(path if path.is_absolute() else path.expanduser().absolute())


def join_url(root: str, path: str) -> str:
    """Return the URL of `path` under `root`.

    >>> join_url("s3://bucket/data/", "shard-000000.tar")
    's3://bucket/data/shard-000000.tar'
    """
    if not path:
        return root
    return root + path if root.endswith("/") else f"{root}/{path}"


def split_url(url: str) -> tuple[str, str]:
    """Return the root and the last name of a URL: what `join_url` put together.

    >>> split_url("s3://bucket/data/dataset.json")
    ('s3://bucket/data', 'dataset.json')
    >>> split_url("dataset.json")
    ('.', 'dataset.json')
    """
    match = _SCHEME.match(url)
    begin = match.end() if match else 0
    head, slash, name = url[begin:].rpartition("/")
    if not name:
        raise ConfigError(f"'{url}' ends without a file name; give the URL of one file.")
    if match:
        if not slash and match.group(1).lower() != "file":
            raise ConfigError(f"'{url}' names a store and no file in it; add the path of the file.")
        return url[:begin] + (head or "/" * bool(slash)), name
    return head or ("/" if slash else "."), name


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of one object."""

    path: str
    """Relative to the store's root."""
    size: int
    etag: str | None


class Fetched(NamedTuple):
    """One range as it came, with what the store said of the whole object."""

    data: Buffer
    """Shorter than asked when the object ends before the range does."""
    object_size: int | None
    etag: str | None
    num_retries: int = 0
    """Attempts beyond those of the client: of a store that throttled."""


class Store(ABC):
    """Objects under one root. Paths are relative to it, with `/` between names. Stores may be pickled."""

    root: str
    """URL of the store, without a slash at its end."""

    def url(self, path: str) -> str:
        """Return the URL of one object, as messages name it."""
        return join_url(self.root, path)

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return the bytes of each `(offset, size)`, in that order; a range past the end comes short."""
        return [self.fetch(path, offset, size).data for offset, size in ranges]

    @abstractmethod
    def get(self, path: str) -> bytes:
        """Return a whole object."""

    @abstractmethod
    def fetch(self, path: str, offset: int, size: int) -> Fetched:
        """Return one range together with the object's size and etag."""

    @abstractmethod
    def put(self, path: str, data: PutData) -> None:
        """Write an object: it appears whole or not at all. A `Path` is a local file to upload."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object whose path begins with `prefix`, sorted by path."""

    @abstractmethod
    def head(self, path: str) -> ObjectInfo:
        """Return size and etag of one object."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove one object; one that is not there is an error."""

    def check_path(self, path: str) -> str:
        """Return `path` when it is relative and stays under the root; raise `ConfigError` otherwise."""
        if not path or path.startswith("/") or ".." in path.split("/"):
            raise ConfigError(
                f"'{path}' is not a path under {self.root}: paths in a store are relative and have no '..'. "
                f"Open the store at the folder that holds the file."
            )
        return path


def check_put(data: PutData) -> None:
    """Refuse what cannot be written."""
    if not (isinstance(data, (bytes, bytearray, memoryview, os.PathLike)) or hasattr(data, "read")):
        raise ConfigError(
            f"put() was given {type(data).__name__}, which holds no bytes; give bytes, a binary file or a Path."
        )


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
        from vlm_stream.storage.local import MemoryStore

        return MemoryStore(url)
    if scheme in _REMOTE:
        from vlm_stream.storage.remote import ObjectStore

        return ObjectStore(url, options)
    if scheme == "hf":
        from vlm_stream.storage.hub import HubStore

        return HubStore(url, options)
    known = ["file", "memory", "hf", *_REMOTE]
    raise ConfigError(f"No store is known for '{scheme}://' (in {url}): {nearest_name(scheme, known)}")
