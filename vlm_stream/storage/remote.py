"""S3, GCS, Azure and plain web servers as stores, through obstore.

obstore retries with backoff, resumes a body that broke off at its byte, and limits the time to connect and to wait for
a byte. Added here: a deadline for a whole read, patience with a store that throttles, and the error tree: what the
client raises -> what kind of fault it is -> the sentence that people read. The client's message is the only place where
a status code can be found; its debug dump is cut off, and URLs lose their query: a signed one would carry a secret into
a log.

Requests run on one event loop of the process, in a thread of its own, so that every one can be cancelled at any time.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import re
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

from vlm_stream.errors import (
    AccessError,
    ChangedObjectError,
    ConfigError,
    NotFoundError,
    StorageError,
    VlmStreamError,
    say_no_descriptors,
)
from vlm_stream.storage.credentials import client_settings
from vlm_stream.storage.options import StoreOptions
from vlm_stream.storage.store import Fetched, ObjectInfo, Store, scheme_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from concurrent.futures import Future
    from pathlib import Path

T = TypeVar("T")
_PART_BYTES = 16 * 1024 * 1024
_LIST_CHUNK = 1000
_BACKOFF_BASE = 4.0
"""The client draws each wait between the first one and the last one times this: below 2.8 waits would not grow."""
_LOCK = threading.Lock()
_LOOP: asyncio.AbstractEventLoop | None = None
_LOOP_PID = 0


def in_background(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Future[T]:
    """Start a coroutine on this process's event loop; to cancel the future ends the request.

    Raises:
        StorageError: No descriptor is left; or this process was forked after its parent had used a remote store: the
            threads of the loop and of obstore did not survive that, and no request would ever end.
    """
    global _LOOP, _LOOP_PID
    if _LOOP is not None and os.getpid() != _LOOP_PID:
        raise StorageError(
            f"Process {os.getpid()} was forked from process {_LOOP_PID} after that one had used a remote store, and no "
            f"request would ever end here. Start worker processes by 'forkserver' or 'spawn' "
            f"(multiprocessing_context of a DataLoader)."
        )
    with _LOCK:
        if _LOOP is None:
            try:
                _LOOP, _LOOP_PID = asyncio.new_event_loop(), os.getpid()
            except OSError as error:  # a loop needs three descriptors
                raise StorageError(say_no_descriptors("no request to a store could be made")) from error
            threading.Thread(target=_LOOP.run_forever, name="vlm-stream-requests", daemon=True).start()
            atexit.register(_cancel_all, _LOOP, _LOOP_PID)
    return asyncio.run_coroutine_threadsafe(function(*args), _LOOP)


def _cancel_all(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """End what is still under way when the interpreter exits, so that nothing calls back into it."""

    async def cancel() -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    if pid == os.getpid():
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(timeout=5)


class ObjectStore(Store):
    """Objects under a URL of a remote store. The client is built at the first request."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        self._options = options or StoreOptions()
        self.root = url.rstrip("/")
        self._is_web = scheme_of(url) in ("http", "https")
        _check_url(self.root)
        self._client: Any = None

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[str, StoreOptions]]:
        """Travel without the client and without credentials."""
        return type(self), (self.root, self._options)

    def __repr__(self) -> str:
        return f"ObjectStore({self.root!r})"

    def get(self, path: str) -> bytes:
        return bytes(_wait(self._get, self.check_path(path), None).data)

    def fetch(self, path: str, offset: int, size: int) -> Fetched:
        return _wait(self.fetch_async, self.check_path(path), offset, size)

    async def fetch_async(self, path: str, offset: int, size: int) -> Fetched:
        if size == 0:  # there is no way to ask for nothing
            return Fetched(b"", None, None)
        return await self._get(path, (offset, offset + size))

    def put(self, path: str, data: bytes | Path) -> None:
        # Asked all the same, web servers answer as if it could pass, and the client looks for a role of this machine.
        if self._is_web:
            raise StorageError(f"{self.root} is a plain web server, which takes no files. Write to another store.")
        if self._options.anonymous and scheme_of(self.root) == "gs":
            raise AccessError(f"{self.root} is used anonymous, and GCS takes no unsigned files. Leave that option out.")
        # In parts when it is large; it appears once all of them are there.
        _wait(self._once, path, lambda obs, client: obs.put_async(client, path, data, chunk_size=_PART_BYTES))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if self._is_web:
            raise StorageError(
                f"{self.root} is a plain web server, which cannot list its files. Name the files: the manifest does."
            )
        # The client matches whole names between slashes; the rest of the prefix is matched here.
        folder = prefix.rpartition("/")[0] or None
        stream: Any = None

        async def next_chunk(obs: Any, client: Any) -> Any:
            nonlocal stream
            stream = stream or obs.list(client, folder, chunk_size=_LIST_CHUNK)
            return await anext(stream, None)

        while chunk := _wait(self._once, prefix, next_chunk):
            for meta in chunk:
                if meta["path"].startswith(prefix):
                    yield _info_of(meta["path"], meta)

    def head(self, path: str) -> ObjectInfo:
        self.check_path(path)
        return _info_of(path, _wait(self._patiently, path, lambda obs, client: obs.head_async(client, path)))

    def delete(self, path: str) -> None:
        self.head(path)  # object stores do not say whether it was there
        _wait(self._once, path, lambda obs, client: obs.delete_async(client, path))

    async def _get(self, path: str, bounds: tuple[int, int] | None) -> Fetched:
        num_attempts = 0

        async def get(obs: Any, client: Any) -> Fetched:
            nonlocal num_attempts
            num_attempts += 1
            answer = await obs.get_async(client, path, options={"range": bounds} if bounds else {})
            meta = answer.meta
            self.has_answered = True
            try:
                data = await answer.bytes_async()
            except Exception as error:
                # A body is resumed only if the object is still the same, but the client does not say when it is not.
                etag = (await obs.head_async(client, path))["e_tag"]
                if etag != meta["e_tag"]:
                    fault = Fault("changed", f"etag {meta['e_tag']}, then {etag}")
                    raise error_of(fault, self.url(path), 0.0) from None
                # Whatever the resumed request was told (that the object ends before it, say), its bytes are there.
                fault = Fault("transient", fault_of(error).text)
                raise _PassingError(str(error_of(fault, self.url(path), 0.0)), fault) from error
            return Fetched(memoryview(data), meta["size"], meta["e_tag"], num_attempts - 1)

        try:
            return await self._patiently(path, get)
        except _PastEndError:
            return Fetched(b"", None, None)

    async def _patiently(self, path: str, operation: Callable[[Any, Any], Awaitable[T]]) -> T:
        """Run something that may be repeated.

        A store that throttles is alive, and one that has answered before will be again: only the deadline ends the
        patience. Others may not be there at all, and have the retries that the client makes.
        """
        retry = self._options.retry
        last = Fault("transient", "no answer in time")
        pause_s = retry.backoff_s
        try:
            async with asyncio.timeout(retry.deadline_s):
                while True:
                    try:
                        return await self._once(path, operation)
                    except _PassingError as error:
                        last = error.fault
                    pause_s = retry.max_backoff_s if last.kind == "throttled" else min(2 * pause_s, retry.max_backoff_s)
                    await asyncio.sleep(random.random() * pause_s)
        except TimeoutError:
            raise error_of(last, self.url(path), retry.deadline_s) from None

    async def _once(self, path: str, operation: Callable[[Any, Any], Awaitable[T]]) -> T:
        """Run something with the client's own retries, and translate its errors."""
        import obstore

        begun_s = time.monotonic()
        try:
            if self._client is None:  # all of this runs on one thread
                self._client = self._build(obstore)
            found = await operation(obstore, self._client)
            self.has_answered = True
            return found
        except VlmStreamError:
            raise
        except Exception as error:
            fault = fault_of(error)
            if fault.kind == "past_end":
                raise _PastEndError from error
            sentence = error_of(fault, self.url(path), time.monotonic() - begun_s)
            passes = fault.kind == "throttled" or (fault.kind == "transient" and self.has_answered)
            raise (_PassingError(str(sentence), fault) if passes else sentence) from error

    def _build(self, obstore: Any) -> Any:
        name, arguments = client_settings(self.root, self._options)
        retry = self._options.retry
        arguments["retry_config"] = {
            "max_retries": retry.max_retries,
            "retry_timeout": timedelta(seconds=retry.deadline_s),
            "backoff": {
                "init_backoff": timedelta(seconds=retry.backoff_s),
                "max_backoff": timedelta(seconds=retry.max_backoff_s),
                "base": _BACKOFF_BASE,
            },
        }
        try:
            return getattr(obstore.store, name)(**arguments)
        except Exception as error:
            raise ConfigError(
                f"{self.root} cannot be opened with these options: {fault_of(error).text}. "
                f"Check endpoint, region and the environment of the store."
            ) from error


class _PassingError(StorageError):
    """The store is busy or away, also after the client's retries; it will be there again."""

    def __init__(self, text: str, fault: Fault) -> None:
        super().__init__(text)
        self.fault = fault


class _PastEndError(Exception):
    """The range begins after the object's end."""


def _wait(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine in the background and wait for it; an interrupt ends the request as well."""
    future = in_background(function, *args)
    try:
        return future.result()
    finally:
        future.cancel()


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


FaultKind: TypeAlias = Literal[
    "throttled",  # 429, 503
    "transient",  # timeouts, resets, other 5xx, broken bodies
    "missing",  # 404
    "refused",  # 401, 403, 400
    "changed",  # 412
    "past_end",  # 416
    "untrusted",  # the server's certificate
    "no_ranges",  # the server sends whole objects only
    "unknown",
]

_STATUS = re.compile(r"status code: (\d{3})")
_QUERY = re.compile(r"(://[^\s?\"']+)\?[^\s\"']+")
_CAUSE = re.compile(
    r'message: "([^"]+)"|"((?:dns|tcp connect) error)"|(InvalidCertificate)|(TimedOut|IncompleteMessage)'
)
_MAX_TEXT = 400
_BY_NAME: dict[str, FaultKind] = {
    "PermissionDeniedError": "refused",
    "UnauthenticatedError": "refused",
    "PreconditionError": "changed",
    "NotSupportedError": "no_ranges",
}
_BY_STATUS: dict[int, FaultKind] = {404: "missing", 408: "transient", 412: "changed", 416: "past_end"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong with one call."""

    kind: FaultKind
    text: str
    """What the store said, fit for a log."""


def fault_of(error: BaseException) -> Fault:
    """Return what an exception of obstore means."""
    text = _clean(str(error))
    if isinstance(error, FileNotFoundError):
        return Fault("missing", text)
    status = _STATUS.search(text)
    if status:
        return fault_of_status(int(status.group(1)), text)
    name = type(error).__name__
    if name in _BY_NAME:
        return Fault(_BY_NAME[name], text)
    if "non-partial response" in text:
        return Fault("no_ranges", text)
    if "InvalidCertificate" in text:
        return Fault("untrusted", text)
    if "HTTP error" in text or isinstance(error, (TimeoutError, ConnectionError)):
        return Fault("transient", text)
    return Fault("unknown", text)


def fault_of_status(status: int, text: str) -> Fault:
    """Return what an HTTP status means; some codes of S3 that pass come with a 400 or 403."""
    if status in (429, 503) or "SlowDown" in text:
        return Fault("throttled", text)
    if status >= 500 or "RequestTimeout" in text or "ThrottlingException" in text:
        return Fault("transient", text)
    return Fault(_BY_STATUS.get(status, "refused"), text)


_SENTENCES: dict[FaultKind, tuple[type[VlmStreamError], str]] = {
    "missing": (
        NotFoundError,
        "There is nothing at {url}. Check the bucket, the path and the endpoint. The store said: {text}",
    ),
    "refused": (
        AccessError,
        "The store refused the request for {url}. Check the credentials (environment, profile or instance role), "
        "their rights on this path, the region and the clock; public data may need anonymous=True. "
        "The store said: {text}",
    ),
    "changed": (
        ChangedObjectError,
        "{url} was replaced while it was being read. Bytes of two versions must not be mixed; "
        "read the dataset again once it is at rest. The store said: {text}",
    ),
    "untrusted": (
        StorageError,
        "The certificate of the server of {url} is not trusted, so nothing is read from it. Check the host name "
        "and the clock; for a private authority set ca_file. The client said: {text}",
    ),
    "no_ranges": (
        StorageError,
        "The server of {url} does not serve byte ranges, and samples are read as ranges. "
        "Use a server that answers 'Range' with 206, or copy the dataset. It said: {text}",
    ),
    "unknown": (StorageError, "{url} could not be read or written. The store said: {text}"),
}
_SENTENCES["throttled"] = _SENTENCES["transient"] = (
    StorageError,
    "{url} could not be read or written in {seconds:.1f} s, with retries. Check the network and the state of "
    "the store, or raise max_retries and deadline_s. The last answer: {text}",
)


def error_of(fault: Fault, url: str, seconds: float) -> VlmStreamError:
    """Return the error that tells people what happened at `url`, and what to check."""
    kind, sentence = _SENTENCES.get(fault.kind, _SENTENCES["unknown"])
    return kind(sentence.format(url=url, text=fault.text, seconds=seconds))


def _clean(text: str) -> str:
    """Return the first sentence of a client's message, with the innermost cause out of its debug dump."""
    sentence, _, dump = text.partition("\n\nDebug source")
    causes = [next(filter(None, match.groups())) for match in _CAUSE.finditer(dump)]
    sentence = _QUERY.sub(r"\1?...", " ".join(sentence.split()))[:_MAX_TEXT]
    return f"{sentence} ({causes[-1]})" if causes else sentence
