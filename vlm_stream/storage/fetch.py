"""One range, whatever happens: retried, resumed at its byte, ended by a deadline.

Enters: a source that can begin a range, and the traffic that it shares with others. Leaves: the whole range, or the
error that says why not. The policy itself is in `retry.py`; what clients raise is understood by the source.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vlm_stream.errors import VlmStreamError
from vlm_stream.storage.faults import error_of
from vlm_stream.storage.retry import Attempts, Fault
from vlm_stream.storage.store import Fetched
from vlm_stream.storage.traffic import ReadCancelledError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.storage.options import RetryOptions
    from vlm_stream.storage.traffic import Traffic

__all__ = ["RangeBody", "RangeSource", "fetch_range"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RangeBody:
    """A range that has begun to arrive."""

    chunks: Iterator[bytes]
    size: int
    """Bytes that will come: fewer than asked when the object ends before the range does."""
    object_size: int | None
    etag: str | None


class RangeSource(Protocol):
    """A store whose ranges come over a network, one attempt at a time."""

    @property
    def retry(self) -> RetryOptions:
        """When to try again."""

    def url(self, path: str) -> str:
        """Return the URL that messages name."""

    def open_range(self, path: str, offset: int, size: int | None) -> RangeBody:
        """Begin a range; None for the rest of the object."""

    def fault_of(self, error: Exception) -> Fault:
        """Return what an exception of `open_range`, or of its chunks, means."""


class _Progress:
    """The bytes of a range so far, over all attempts."""

    def __init__(self, offset: int, size: int | None) -> None:
        self.offset = offset
        self.size = size
        self.chunks: list[bytes] = []
        self.num_bytes = 0
        self.object_size: int | None = None
        self.etag: str | None = None

    @property
    def rest(self) -> int | None:
        """Bytes that are missing; None while nobody knows."""
        return None if self.size is None else self.size - self.num_bytes

    def attempt(self, source: RangeSource, path: str, attempts: Attempts, traffic: Traffic) -> None:
        """Ask for what is missing and take it chunk by chunk."""
        body = source.open_range(path, self.offset + self.num_bytes, self.rest)
        if self.chunks and body.etag != self.etag:
            raise error_of(Fault("changed", f"etag {self.etag}, then {body.etag}"), source.url(path), 0.0)
        self.object_size, self.etag = body.object_size, body.etag
        self.size = self.num_bytes + body.size
        for chunk in body.chunks:
            self.chunks.append(chunk)
            self.num_bytes += len(chunk)
            traffic.check_open()
            if self.num_bytes == self.size:
                break  # to ask for the end of the body costs as much as to ask for bytes
            if attempts.is_late(time.monotonic()):
                raise TimeoutError("the body came too slowly")

    def result(self) -> Fetched:
        """Return what came; one chunk needs no copy."""
        data = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
        return Fetched(data, self.object_size, self.etag)


def fetch_range(source: RangeSource, path: str, offset: int, size: int | None, traffic: Traffic) -> Fetched:
    """Return one range, or the whole object from `offset` when size is None.

    Raises:
        NotFoundError: Nothing is there; not retried.
        AccessError: The store refused; not retried.
        StorageError: The retries or the deadline ran out.
        ReadCancelledError: The traffic was closed.
    """
    if size == 0:  # there is no way to ask for nothing
        return Fetched(b"", None, None)
    progress = _Progress(offset, size)
    attempts = Attempts(source.retry, time.monotonic())
    while True:
        num_before = progress.num_bytes
        fault: Fault | None = Fault("unknown", "ended by another error")
        traffic.begin_request(progress.rest or 0)
        try:
            progress.attempt(source, path, attempts, traffic)
            fault = None
        except (ReadCancelledError, VlmStreamError):
            raise
        except Exception as error:
            fault, cause = source.fault_of(error), error
        finally:
            num_new = progress.num_bytes - num_before
            traffic.end_request(num_new, fault.kind if fault else None)
        if fault is None or fault.kind == "past_end" or progress.rest == 0:
            return progress.result()
        now_s = time.monotonic()
        wait_s = attempts.wait_before_next(fault, progressed=num_new > 0, now_s=now_s, uniform=random.random())
        if wait_s is None:
            raise error_of(fault, source.url(path), now_s - attempts.begun_s) from cause
        _log.debug("%s: %s; again in %.2f s from byte %d", source.url(path), fault.text, wait_s, progress.num_bytes)
        traffic.metrics.add(retries=1)
        traffic.sleep(wait_s)
