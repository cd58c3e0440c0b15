"""S3, GCS, Azure and plain web servers as stores, through obstore.

Ranges are asked for without the client's own retries: `fetch.py` owns that policy, because only it can resume a body
and see throttling. Writes, lists and the rest keep the client's retries; large writes go in parts and appear at once.

Clients belong to a process and are built when first used, so a store may be pickled or carried over a fork.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vlm_stream.errors import ConfigError, StorageError, VlmStreamError
from vlm_stream.storage.client import obstore_here
from vlm_stream.storage.credentials import aws_config
from vlm_stream.storage.faults import error_of, fault_of
from vlm_stream.storage.fetch import RangeBody, fetch_range
from vlm_stream.storage.metrics import ReadMetrics
from vlm_stream.storage.options import RetryOptions, StoreOptions
from vlm_stream.storage.traffic import Traffic
from vlm_stream.storage.url import check_path, join_url, scheme_of
from vlm_stream.storage.values import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vlm_stream.storage.retry import Fault
    from vlm_stream.storage.store import Buffer, Fetched, PutData

__all__ = ["ObjectStore", "client_settings"]

_PART_BYTES = 16 * 1024 * 1024
_LIST_CHUNK = 1000
_QUIET_INFLIGHT = 16
_SMALL_BYTES = 256 * 1024


class ObjectStore:
    """Objects under a URL of a remote store."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        """Check the URL; nothing is opened yet."""
        self._options = options or StoreOptions()
        self._root = url.rstrip("/")
        self._scheme = scheme_of(url)
        _check_url(self._root)
        self._clients: dict[tuple[int, bool], Any] = {}
        self._locks: dict[tuple[int, bool], threading.Lock] = {}

    @property
    def root(self) -> str:
        """Return the URL without a slash at its end."""
        return self._root

    @property
    def retry(self) -> RetryOptions:
        """Return when ranges are tried again."""
        return self._options.retry

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[str, StoreOptions]]:
        """Travel without clients and without credentials."""
        return type(self), (self._root, self._options)

    def __repr__(self) -> str:
        """Name the URL alone."""
        return f"ObjectStore({self._root!r})"

    def url(self, path: str) -> str:
        """Return the URL of one object."""
        return join_url(self._root, path)

    def get(self, path: str) -> bytes:
        """Return a whole object."""
        data = fetch_range(self, check_path(self._root, path), 0, None, self._quiet_traffic()).data
        return data if isinstance(data, bytes) else bytes(data)

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return the bytes of each `(offset, size)`, one after the other; `SpanReader` reads many at a time."""
        return [self.fetch(path, offset, size).data for offset, size in ranges]

    def fetch(self, path: str, offset: int, size: int) -> Fetched:
        """Return one range with the object's size and etag."""
        return fetch_range(self, check_path(self._root, path), offset, size, self._quiet_traffic())

    def open_range(self, path: str, offset: int, size: int | None) -> RangeBody:
        """Begin a range, once; None for the rest of the object."""
        asked: dict[str, Any] = {}
        if size is not None:
            asked["range"] = (offset, offset + size)
        elif offset:
            asked["range"] = {"offset": offset}
        answer = obstore_here().get(self._client(patient=False), path, options=asked)
        (begin, end), meta = answer.range, answer.meta
        # The smallest chunk: each one is kept as soon as it is here, so a broken body loses nothing. Whole objects
        # that are small (hundreds of indexes at a start) come in one piece, at two thirds of the processor time.
        at_once = size is None and end - begin <= _SMALL_BYTES
        chunks = iter((bytes(answer.bytes()),)) if at_once else answer.stream(1)
        return RangeBody(chunks, end - begin, meta["size"], meta["e_tag"])

    def fault_of(self, error: Exception) -> Fault:
        """Return what the client's exception means."""
        return fault_of(error)

    def put(self, path: str, data: PutData) -> None:
        """Write an object, in parts when it is large; it appears once all of them are there."""
        if not (isinstance(data, (bytes, bytearray, memoryview, os.PathLike)) or hasattr(data, "read")):
            raise ConfigError(
                f"put() was given {type(data).__name__}, which holds no bytes; give bytes, a binary file or a Path."
            )
        content = bytes(data) if isinstance(data, (bytearray, memoryview)) else data
        self._call(path, lambda obs, client: obs.put(client, path, content, chunk_size=_PART_BYTES))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object whose path begins with `prefix`."""
        if self._scheme in ("http", "https"):
            raise StorageError(
                f"{self._root} is a plain web server, which cannot list its files. Name the files: the manifest does."
            )
        # The client matches whole names between slashes; the rest of the prefix is matched here.
        folder = prefix.rpartition("/")[0]
        stream = self._call(prefix, lambda obs, client: iter(obs.list(client, folder or None, chunk_size=_LIST_CHUNK)))
        while chunk := self._call(prefix, lambda _obs, _client: next(stream, None)):
            for meta in chunk:
                if meta["path"].startswith(prefix):
                    yield _info_of(meta["path"], meta)

    def head(self, path: str) -> ObjectInfo:
        """Return size and etag."""
        check_path(self._root, path)
        meta = self._call(path, lambda obs, client: obs.head(client, path))
        return _info_of(path, meta)

    def delete(self, path: str) -> None:
        """Remove one object; object stores do not say whether it was there, so that is asked first."""
        self.head(path)
        self._call(path, lambda obs, client: obs.delete(client, path))

    def _call(self, path: str, operation: Callable[[Any, Any], Any]) -> Any:
        begun_s = time.monotonic()
        try:
            return operation(obstore_here(), self._client(patient=True))
        except VlmStreamError:
            raise
        except Exception as error:
            raise error_of(fault_of(error), self.url(path), time.monotonic() - begun_s) from error

    def _client(self, *, patient: bool) -> Any:
        key = (os.getpid(), patient)
        client = self._clients.get(key)
        if client is None:
            # One at a time: the threads of a reader all come here first, and a client takes milliseconds to build. The
            # lock is this process's own, because a fork may come while another thread holds the parent's.
            with self._locks.setdefault(key, threading.Lock()):
                client = self._clients.get(key)
                if client is None:
                    client = self._clients[key] = self._build(patient=patient)
        return client

    def _build(self, *, patient: bool) -> Any:
        module = obstore_here()
        name, arguments = client_settings(self._root, self._options)
        retry: dict[str, Any] = {"max_retries": self.retry.max_retries if patient else 0}
        if patient:
            retry["retry_timeout"] = timedelta(seconds=self.retry.deadline_s)
        try:
            return getattr(module.store, name)(**arguments, retry_config=retry)
        except Exception as error:
            raise ConfigError(
                f"{self._root} cannot be opened with these options: {fault_of(error).text}. "
                f"Check endpoint, region and the environment of the store."
            ) from error

    def _quiet_traffic(self) -> Traffic:
        return Traffic(ReadMetrics(), _QUIET_INFLIGHT)


def _info_of(path: str, meta: Any) -> ObjectInfo:
    """Return size and etag, the latter without quotes: stores keep them in one answer and drop them in another."""
    etag = meta["e_tag"]
    return ObjectInfo(path, meta["size"], etag.strip('"') if etag else None)


def _check_url(root: str) -> None:
    parts = urlsplit(root)
    if not parts.netloc:
        raise ConfigError(f"'{root}' names no bucket or host; write {parts.scheme}://name/path.")
    if "@" in parts.netloc:
        raise ConfigError(
            f"The {parts.scheme} URL of {parts.hostname} holds a user or password; credentials come from the "
            f"environment, the profile or the instance role. Remove the part before '@'."
        )
    if parts.query or parts.fragment:
        raise ConfigError(
            f"The URL {parts.scheme}://{parts.netloc}{parts.path} has a query or fragment, which stores do not take. "
            f"Give the folder that holds the dataset."
        )


def client_settings(root: str, options: StoreOptions) -> tuple[str, dict[str, Any]]:
    """Return the client's class name and arguments for a URL: everything but the retries."""
    parts = urlsplit(root)
    transport: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "read_timeout": timedelta(seconds=options.read_timeout_s),
        # The client's own limit for a whole body would end large reads; the deadline is kept outside.
        "timeout": timedelta(seconds=options.retry.deadline_s),
    }
    # The environment's word for it would be lost: the client takes these options from one place.
    said = parts.scheme == "s3" and os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    if options.allow_http or parts.scheme == "http" or said:
        transport["allow_http"] = True
    if options.ca_file is not None:
        try:
            transport["root_certificate"] = Path(options.ca_file).read_bytes()
        except OSError as error:
            raise ConfigError(f"StoreOptions.ca_file {options.ca_file} cannot be read: {error.strerror}.") from error
    arguments: dict[str, Any] = {"client_options": transport}
    if parts.scheme in ("http", "https"):
        return "HTTPStore", {"url": root, **arguments}
    if parts.path.strip("/"):
        arguments["prefix"] = parts.path.strip("/")
    if options.anonymous:
        arguments["skip_signature"] = True
    if parts.scheme == "s3":
        return "S3Store", {"bucket": parts.netloc, **arguments, **_s3_settings(parts.netloc, options)}
    if parts.scheme == "gs":
        if options.endpoint:
            arguments["base_url"] = options.endpoint
        return "GCSStore", {"bucket": parts.netloc, **arguments}
    if options.endpoint:
        arguments["endpoint"] = options.endpoint
    return "AzureStore", {"container_name": parts.netloc, **arguments}


def _s3_settings(bucket: str, options: StoreOptions) -> dict[str, Any]:
    """Return region, endpoint, addressing and the credentials' provider."""
    found: dict[str, Any] = {} if options.anonymous else aws_config(options.profile)
    if options.region:
        found["region"] = options.region
    if options.endpoint:
        found["endpoint"] = options.endpoint.rstrip("/")
    if options.path_style is False:
        found["virtual_hosted_style_request"] = True
        if "endpoint" in found:
            scheme, host = found["endpoint"].split("://", 1)
            found["endpoint"] = f"{scheme}://{bucket}.{host}"
    return found
