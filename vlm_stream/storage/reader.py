"""Spans in plan order in, samples in the same order out, their bytes read ahead of need and verified.

The caller's iterable is pulled in batches, as many spans as fit in `prefetch_bytes`; each batch is merged into requests
(`coalesce.py`), which run in the background while earlier samples are used. The first batch is small and the next ones
are larger and larger, so that the first samples neither wait nor compete for what is needed later. It must not know
tars or plans: a span says where its members lie, and a tag is handed back untouched.
"""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar, Union

from vlm_stream.errors import BadSampleError, NotFoundError, StorageError
from vlm_stream.storage.coalesce import RangeRequest, plan_requests
from vlm_stream.storage.engine import Engine
from vlm_stream.storage.metrics import ReadMetrics, ReadTotals
from vlm_stream.storage.options import ReadOptions
from vlm_stream.storage.traffic import ReadCancelledError
from vlm_stream.storage.verify import check_unchanged, cut_members, find_damage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Future
    from types import TracebackType

    from vlm_stream.storage.options import StoreOptions
    from vlm_stream.storage.store import Buffer, Fetched, Store
    from vlm_stream.storage.values import Span

__all__ = ["SpanReader", "SpanResult"]

T = TypeVar("T")
_FIRST_SAMPLES = 32
_GROWTH = 4
SpanResult = Union["Mapping[str, memoryview]", BadSampleError]


@dataclass(slots=True)
class _Flight:
    """A request under way, and how many samples still need its bytes."""

    request: RangeRequest
    future: Future[Fetched] | None
    """None: the bytes lie in memory, and are read when the first of their samples is due."""
    num_users: int
    read: Fetched | None = None
    """What was read then."""


@dataclass(slots=True)
class _Waiting(Generic[T]):
    """A sample in the queue, with the requests that bring it."""

    tag: T
    span: Span
    flights: list[_Flight] = field(default_factory=list)


class SpanReader:
    """Reads spans of any number of stores. Use it as a context manager; it may be created before a fork or pickled."""

    def __init__(
        self,
        options: ReadOptions | None = None,
        stores: Mapping[str, Store] | None = None,
        store_options: StoreOptions | None = None,
    ) -> None:
        """Keep the options; threads and connections begin with the first read.

        Args:
            options: How far ahead to read and how to merge.
            stores: Stores that are open already, by root; others are opened as spans name them.
            store_options: How to open them.
        """
        self._options = options or ReadOptions()
        self._given_stores = dict(stores or {})
        self._store_options = store_options
        self._metrics = ReadMetrics()
        self._engine: Engine | None = None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[SpanReader], tuple[object, ...]]:
        """Travel to another process without threads, connections and counts."""
        return type(self), (self._options, self._given_stores, self._store_options)

    def __enter__(self) -> SpanReader:
        """Return the reader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @property
    def metrics(self) -> ReadTotals:
        """Return what was read so far, in this process."""
        self._renew_after_fork()
        return self._metrics.totals()

    def close(self) -> None:
        """Stop what is under way, end the threads, let go of the connections. A later read starts anew."""
        engine, self._engine = self._engine, None
        if engine is not None and self._pid == os.getpid():
            engine.close()

    def read(self, pairs: Iterable[tuple[T, Span]]) -> Iterator[tuple[T, SpanResult]]:
        """Yield `(tag, members)` or `(tag, BadSampleError)` for each pair, in the order of the pairs.

        Raises:
            ChangedObjectError: A shard was replaced by another than the manifest describes. (One that was cut short
                gives bad samples.)
            NotFoundError: A shard is not there, and `missing_is_bad` is off.
            StorageError: Bytes could not be read, after all retries.
        """
        source = iter(pairs)
        queue: deque[_Waiting[T]] = deque()
        options = self._options
        num_ahead = 0
        max_samples = _FIRST_SAMPLES // _GROWTH
        exhausted = False
        try:
            while queue or not exhausted:
                # At half, so that requests are planned and merged many at a time.
                if not exhausted and num_ahead <= options.prefetch_bytes // 2 and len(queue) <= max_samples // 2:
                    max_samples = min(_GROWTH * max_samples, options.prefetch_samples)
                    batch = _pull(source, options.prefetch_bytes - num_ahead, max_samples - len(queue))
                    exhausted = not batch
                    num_ahead += self._launch(batch)
                    queue.extend(batch)
                    continue
                waiting = queue.popleft()
                result = self._finish(waiting)
                for flight in waiting.flights:
                    flight.num_users -= 1
                    if not flight.num_users:
                        num_ahead -= flight.request.size
                        flight.read = None  # else the memory of the last samples could not be used again
                yield waiting.tag, result
        finally:
            for waiting in queue:
                for flight in waiting.flights:
                    if flight.future is not None:
                        flight.future.cancel()

    def _launch(self, batch: list[_Waiting[T]]) -> int:
        """Start the requests of a batch; return their bytes."""
        engine = self._running_engine()
        num_bytes = 0
        spans = [waiting.span for waiting in batch]
        limits = engine.run_limits({span.root for span in spans})
        for request in plan_requests(spans, self._options, limits):
            flight = _Flight(request, engine.submit(request), len(request.spans))
            for position in request.spans:
                batch[position].flights.append(flight)
            num_bytes += request.size
        return num_bytes

    def _running_engine(self) -> Engine:
        self._renew_after_fork()
        if self._engine is None:
            self._engine = Engine(self._options, self._given_stores, self._store_options, self._metrics)
        return self._engine

    def _renew_after_fork(self) -> None:
        """Leave behind what a child cannot use: the parent's threads, and a lock that one of them may have held."""
        if self._pid != os.getpid():
            self._pid, self._engine, self._metrics = os.getpid(), None, ReadMetrics()

    def _wait_for(self, waiting: _Waiting[T]) -> tuple[Buffer, int | None]:
        """Return a sample's bytes once they are here, from a shard that is still the one that was indexed.

        Beside them their checksum, where it is known already.
        """
        try:
            parts = [self._fetched(flight) for flight in waiting.flights]
        except (ReadCancelledError, CancelledError):
            raise StorageError(
                "The reader was closed while samples were still being read from it. Read to the end, or stop reading "
                "before closing."
            ) from None
        for part in parts:
            check_unchanged(waiting.span, part)
        return _span_bytes(waiting.span, waiting.flights, parts)

    def _fetched(self, flight: _Flight) -> Fetched:
        if flight.future is not None:
            return flight.future.result()
        if flight.read is None:
            flight.read = self._running_engine().read_now(flight.request)
        return flight.read

    def _finish(self, waiting: _Waiting[T]) -> SpanResult:
        """Wait for a sample's bytes, check them, cut them into members."""
        span = waiting.span
        begun_s = time.perf_counter()
        try:
            data, crc = self._wait_for(waiting)
        except NotFoundError as error:
            if not self._options.missing_is_bad:
                raise
            self._metrics.add_sample(span.size, 0.0, is_bad=True)
            return BadSampleError("read", "missing_shard", f"{error} The sample is left out.")
        waited_s = time.perf_counter() - begun_s
        damage = find_damage(span, data, crc)
        if damage is not None and damage.reason in ("crc_mismatch", "truncated"):
            again = self._running_engine().read_again(span)
            check_unchanged(span, again)
            data = again.data
            damage = find_damage(span, data)
        self._metrics.add_sample(span.size, waited_s, is_bad=damage is not None)
        if damage is not None:
            return damage
        return cut_members(span, data)


def _pull(source: Iterator[tuple[T, Span]], num_bytes: int, num_samples: int) -> list[_Waiting[T]]:
    """Take pairs until they hold `num_bytes` or are so many, at least one; nothing when there are no more."""
    batch: list[_Waiting[T]] = []
    for tag, span in source:
        batch.append(_Waiting(tag, span))
        num_bytes -= span.size
        if num_bytes <= 0 or len(batch) >= num_samples:
            break
    return batch


def _span_bytes(span: Span, flights: list[_Flight], fetched: list[Fetched]) -> tuple[Buffer, int | None]:
    """Return the span's bytes out of the request, or requests, that cover it, and their checksum if it is known."""
    if len(flights) > 1:
        return b"".join(part.data for part in fetched), None
    request, (data, _, _, crc) = flights[0].request, fetched[0]
    if request.offset == span.offset and request.size == span.size:
        return data, crc
    begin = span.offset - request.offset
    return memoryview(data)[begin : begin + span.size], None
