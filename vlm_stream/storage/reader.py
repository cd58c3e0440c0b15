"""Spans in, samples out: the reader that a builder holds.

`begin` merges the spans of one batch into requests and starts them; `Reading.results` waits, checks the bytes and cuts
them into members. Nothing is read ahead across batches: the caller of `begin` decides how many bytes are under way.
"""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Union

from vlm_stream.errors import BadSampleError, NotFoundError, StorageError
from vlm_stream.storage.engine import Engine, ReadMetrics, ReadTotals
from vlm_stream.storage.options import ReadOptions
from vlm_stream.storage.spans import check_unchanged, open_sample, plan_requests

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from vlm_stream.storage.options import StoreOptions
    from vlm_stream.storage.spans import RangeRequest, Span
    from vlm_stream.storage.store import Fetched

__all__ = ["Reading", "SpanReader", "SpanResult"]

SpanResult = Union["Mapping[str, memoryview]", BadSampleError]


class Reading:
    """The spans of one `begin`, being read in the background."""

    def __init__(self, spans: Sequence[Span], engine: Engine, options: ReadOptions) -> None:
        self._spans = list(spans)
        self._engine = engine
        self._missing_is_bad = options.missing_is_bad
        self._requests: deque[tuple[RangeRequest, Future[Fetched]]] = deque()
        """Those whose bytes were not taken yet."""
        self._is_over = False
        for request in plan_requests(self._spans, options):
            self._requests.append((request, engine.submit(request)))

    def results(self) -> list[SpanResult]:
        """Wait; return the members of each span, or what is wrong with it, in the order of the spans. Call it once.

        Raises:
            ChangedObjectError: A shard was replaced by another than the manifest describes. (One that was cut short
                gives bad samples.)
            NotFoundError: A shard is not there, and `missing_is_bad` is off.
            StorageError: Bytes could not be read, after all retries; or the reading was cancelled.
        """
        begun_s = time.perf_counter()
        parts: list[list[memoryview]] = [[] for _ in self._spans]
        missing: dict[int, BadSampleError] = {}
        try:
            if self._is_over:
                raise CancelledError
            while self._requests:
                request, future = self._requests.popleft()
                fetched = self._wait(request, future)
                for position in request.spans:
                    if isinstance(fetched, BadSampleError):
                        missing[position] = fetched
                    else:
                        parts[position].append(_part_of(self._spans[position], request, fetched))
        except CancelledError:
            raise StorageError(
                "The reading was cancelled, or its reader closed, before its samples were there; or they were taken "
                "already. Take the results once, before that, or begin again."
            ) from None
        finally:
            self.cancel()  # the rest is not needed any more
        waited_s = time.perf_counter() - begun_s
        results = [
            missing[position] if position in missing else self._open(span, parts[position])
            for position, span in enumerate(self._spans)
        ]
        self._engine.metrics.add(
            samples=len(results),
            bad_samples=sum(isinstance(result, BadSampleError) for result in results),
            bytes_wanted=sum(span.size for span in self._spans),
            queue_wait_s=waited_s,
        )
        return results

    def cancel(self) -> None:
        """End the requests; only reads of local files that have started run to their end."""
        self._is_over = True
        for _, future in self._requests:
            future.cancel()
        self._requests.clear()  # an outcome may hold a connection

    def _wait(self, request: RangeRequest, future: Future[Fetched]) -> Fetched | BadSampleError:
        """Return what a request brings, from a shard that is still the one that was indexed."""
        try:
            fetched = future.result()
        except NotFoundError as error:
            if not self._missing_is_bad:
                raise
            return BadSampleError("read", "missing_shard", f"{error} The sample is left out.")
        check_unchanged(request, fetched)
        return fetched

    def _open(self, span: Span, parts: list[memoryview]) -> SpanResult:
        """Check and cut one sample; read it once more where its bytes look damaged."""
        result = open_sample(span, parts[0] if len(parts) == 1 else memoryview(b"".join(parts)))
        if isinstance(result, BadSampleError) and result.reason in ("crc_mismatch", "truncated"):
            again = self._engine.read_again(span)
            check_unchanged(span, again)
            result = open_sample(span, memoryview(again.data))
        return result


class SpanReader:
    """Reads spans of any number of stores. Use it as a context manager; it may be pickled."""

    def __init__(self, options: ReadOptions | None = None, store_options: StoreOptions | None = None) -> None:
        """Keep the options; threads and connections begin with the first read.

        Args:
            options: How to merge, what to check, how many requests at a time.
            store_options: How to open the stores that the spans name.
        """
        self._options = options or ReadOptions()
        self._store_options = store_options
        self._metrics = ReadMetrics()
        self._engine: Engine | None = None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[SpanReader], tuple[object, ...]]:
        """Travel to another process without threads, connections and counts."""
        return type(self), (self._options, self._store_options)

    def __enter__(self) -> SpanReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def metrics(self) -> ReadTotals:
        """Return what was read so far, in this process."""
        self._renew_after_fork()
        return self._metrics.totals()

    def begin(self, spans: Sequence[Span]) -> Reading:
        """Start to read some spans and return at once; requests that began earlier are served earlier."""
        self._renew_after_fork()
        if self._engine is None:
            self._engine = Engine(self._options, self._store_options, self._metrics)
        return Reading(spans, self._engine, self._options)

    def close(self) -> None:
        """Stop what is under way, end the threads, close the connections. A later read starts again."""
        engine, self._engine = self._engine, None
        if engine is not None and self._pid == os.getpid():
            engine.close()

    def _renew_after_fork(self) -> None:
        """Drop what a child cannot use: the parent's threads, and a lock that one of them may have held."""
        if self._pid != os.getpid():
            self._pid, self._engine, self._metrics = os.getpid(), None, ReadMetrics()


def _part_of(span: Span, request: RangeRequest, fetched: Fetched) -> memoryview:
    """Return those bytes of a request that belong to a span, which may be longer than the request."""
    begin = max(span.offset - request.offset, 0)
    return memoryview(fetched.data)[begin : max(span.offset + span.size - request.offset, 0)]
