"""URLs, the one interface to bytes at rest, `open_store` (a URL in, a store out, chosen by scheme), `ObjectReader`.

A store knows paths, bytes, sizes and etags. It must not know tars, samples or plans.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

import crc32c

from vlm_stream.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vlm_stream.storage.options import StoreOptions


Buffer: TypeAlias = bytes | bytearray | memoryview

_REMOTE = ("s3", "gs", "az", "http", "https")
_REQUEST_BYTES = 8 << 20
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
            host = parts.netloc.rpartition("@")[2]
            raise ConfigError(
                f"{url} names the host '{host}', so it cannot be read as a local file. "
                f"Write three slashes for a local path: file:///{host}{parts.path}"
            )
        return str(Path(unquote(parts.path)).absolute())
    if not url:
        raise ConfigError(
            "an empty text names no file and no folder, so nothing is read or written; give a path or URL ('.' is the "
            "current folder). A variable that was never set is the usual cause."
        )
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


def host_of(url: str) -> tuple[str, str]:
    """Return scheme, and host or bucket.

    >>> host_of("HTTPS://user@Host:80/a"), host_of("/data/set")
    (('https', 'host:80'), ('file', ''))
    """
    scheme = scheme_of(url)
    if scheme == "file":
        return scheme, ""
    place = url.partition("://")[2]
    host = place.replace("\\", "/").partition("/")[0].partition("?")[0].partition("#")[0].rpartition("@")[2].lower()
    # On the hub the owner and the name are what a bucket is elsewhere.
    return (scheme, "/".join(place.split("/")[:3])) if scheme == "hf" else (scheme, host)


def is_under(url: str, folder: str) -> bool:
    """Tell whether a URL is that of a folder, or lies in it; one with `..` in it lies nowhere.

    >>> is_under("s3://a/data/x", "s3://a/data"), is_under("s3://a/database", "s3://a/data")
    (True, False)
    """
    inner, outer = url.rstrip("/"), folder.rstrip("/")
    is_plain = ".." not in re.split(r"[/\\]|%2[fF]|%5[cC]", inner.replace("%2e", ".").replace("%2E", "."))
    return is_plain and host_of(inner) == host_of(outer) and (inner == outer or inner.startswith(f"{outer}/"))


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
    has_answered = False
    """Whether a request was answered: then it is there, and only the deadline ends the patience with it."""

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
    def put(self, path: str, data: bytes | Path) -> None:
        """Write an object: it appears whole or not at all. A `Path` is a local file to copy."""

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


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """Return the store at `url`; nothing is read yet, so this neither waits nor fails on the network.

    Args:
        url: A path, `file://`, `s3://bucket/...`, `gs://bucket/...`, `az://container/...`, `http(s)://...` or
            `hf://datasets/owner/name...`.
        options: Endpoint, region, timeouts and such; local stores need none.
    """
    scheme = scheme_of(url)
    if scheme == "file":
        from vlm_stream.storage.local import LocalStore

        return LocalStore(url)
    if scheme in _REMOTE:
        from vlm_stream.storage.remote import ObjectStore

        return ObjectStore(url, options)
    if scheme == "hf":
        from vlm_stream.storage.hub import HubStore

        return HubStore(url, options)
    known = ["file", "hf", *_REMOTE]
    raise ConfigError(f"No store is known for '{scheme}://' (in {url}): {nearest_name(scheme, known)}")


class ObjectReader:
    """One object from front to back, in large requests, one ahead, with a checksum on the way. Use it with `with`."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        """Start at the first of the object's `size` bytes."""
        self.position = 0
        self._store, self._path, self._size = store, path, size
        self._crc = 0
        self._chunk = b""
        self._used = 0
        self._asked = 0
        self._pool = ThreadPoolExecutor(1)
        self._next: Future[bytes] | None = None
        self._ask()

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *_: object) -> None:
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
        size = min(_REQUEST_BYTES, self._size - self._asked)
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
