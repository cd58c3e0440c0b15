"""One reading of groups of spans: which bytes are asked for when, and what becomes of them.

Spans are pulled in batches, as many as fit in `prefetch_bytes`; each batch is merged into requests (`coalesce.py`),
which run in the background while earlier samples are used. The first batch is small and the next ones are larger and
larger, so that the first samples neither wait nor compete for what is needed later. What need not travel is read when
it is due. Spans that are used together come as a group and leave as one; a group may be larger than what is read ahead.
It must not know tars or plans: a span says where its members lie, and a tag is handed back untouched.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import CancelledError, Future
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar, Union

from vlm_stream.errors import BadSampleError, NotFoundError, StorageError
from vlm_stream.storage.coalesce import plan_requests
from vlm_stream.storage.store import Fetched
from vlm_stream.storage.traffic import ReadCancelledError
from vlm_stream.storage.verify import check_unchanged, open_sample

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from vlm_stream.storage.coalesce import RangeRequest
    from vlm_stream.storage.engine import Engine
    from vlm_stream.storage.options import ReadOptions
    from vlm_stream.storage.values import Span

__all__ = ["ReadAhead", "SpanResult"]

T = TypeVar("T")
_FIRST_SAMPLES = 16
_GROWTH = 4
_ENOUGH_BYTES = 1024 * 1024
SpanResult = Union["Mapping[str, memoryview]", BadSampleError]


class _Flight:
    """A request under way, and the samples that need its bytes."""

    __slots__ = ("future", "num_users", "request", "users")

    def __init__(self, request: RangeRequest, future: Future[Fetched] | Fetched | None, users: list[_Waiting]) -> None:
        self.request = request
        self.future = future
        """Or what it brought already; None: the bytes lie in memory, and are read when the first of their samples is
        due."""
        self.users = users
        """Until it has landed."""
        self.num_users = len(users)
        """Not handed out yet."""


class _Waiting:
    """A sample in the queue, with the requests that bring it, in the end with what they brought."""

    __slots__ = ("flights", "landed", "result", "span")
    result: SpanResult
    """Once it has landed."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.flights: list[_Flight] = []
        self.landed = False

    def land(self, result: SpanResult) -> None:
        self.result = result
        self.landed = True


class ReadAhead(Generic[T]):
    """Groups in, their samples out."""

    def __init__(
        self,
        groups: Iterable[tuple[T, Sequence[Span]]],
        engine: Callable[[], Engine],
        options: ReadOptions,
    ) -> None:
        """Prepare; nothing is pulled yet. `engine` returns the one to use: it may be another one after a fork."""
        self._engine = engine
        self._options = options
        self._groups: deque[tuple[T, int]] = deque()
        """Tags of the groups that were pulled, with their spans that are still to be handed out."""
        self._spans = self._flatten(groups)
        self._num_begun = 0
        """Spans of those groups that are still to be pulled."""
        self._queue: deque[_Waiting] = deque()
        self._num_ahead = 0
        self._max_samples = _FIRST_SAMPLES // _GROWTH
        self._exhausted = False
        self._in_memory = True
        self._waited_s = 0.0

    def next_group(self) -> tuple[T, list[SpanResult]] | None:
        """Return the next group's tag and samples; None behind the last."""
        while not self._groups:
            if self._exhausted:
                return None
            self._refill()
        tag, num_spans = self._groups.popleft()
        self._waited_s = 0.0
        results: list[SpanResult] = []
        num_bytes = num_bad = 0
        for _ in range(num_spans):
            while not self._exhausted and self._is_low():
                self._refill()
            waiting = self._queue.popleft()
            num_bytes += waiting.span.size
            if not waiting.landed:
                self._land(waiting)
            results.append(waiting.result)
            num_bad += isinstance(waiting.result, BadSampleError)
            for flight in waiting.flights:
                flight.num_users -= 1
                if not flight.num_users:
                    self._num_ahead -= flight.request.size
        self._engine().metrics.add(
            samples=num_spans, bytes_wanted=num_bytes, queue_wait_s=self._waited_s, bad_samples=num_bad
        )
        return tag, results

    def close(self) -> None:
        """Give up what is under way, and let go of it: a request's outcome may hold its connection."""
        for waiting in self._queue:
            for flight in waiting.flights:
                flight.users.clear()
                if isinstance(flight.future, Future):
                    flight.future.cancel()
        self._queue.clear()
        self._spans.close()

    def _flatten(self, groups: Iterable[tuple[T, Sequence[Span]]]) -> Generator[Span, None, None]:
        for tag, spans in groups:
            self._groups.append((tag, len(spans)))
            self._num_begun += len(spans)
            yield from spans

    def _is_low(self) -> bool:
        if not self._queue or self._in_memory:  # nothing had to travel so far: to ask early would gain nothing
            return not self._queue
        # At half, so that requests are planned and merged many at a time.
        return self._num_ahead <= self._options.prefetch_bytes // 2 and len(self._queue) <= self._max_samples // 2

    def _refill(self) -> None:
        """Pull spans until they hold what may still be read ahead, at least one, and start their requests."""
        self._max_samples = min(_GROWTH * self._max_samples, self._options.prefetch_samples)
        max_bytes = self._options.prefetch_bytes - self._num_ahead
        num_bytes = 0
        batch: list[_Waiting] = []
        for span in islice(self._spans, max(1, self._max_samples - len(self._queue))):
            batch.append(_Waiting(span))
            self._num_begun -= 1
            num_bytes += span.size
            # Of what lies in memory no more than goes together: then its memory is let go of together, and what is
            # read next is written where the processor's cache still is.
            if num_bytes >= max_bytes or (self._in_memory and not self._num_begun and num_bytes >= _ENOUGH_BYTES):
                break
        self._exhausted = not batch
        engine = self._engine()
        spans = [waiting.span for waiting in batch]
        num_fetched = num_bytes = 0
        for request in plan_requests(spans, self._options, engine.local_roots({span.root for span in spans})):
            users = [batch[position] for position in request.spans]
            flight = _Flight(request, engine.submit(request), users)
            self._in_memory &= not isinstance(flight.future, Future)
            if isinstance(flight.future, Fetched):
                num_fetched += 1
                num_bytes += request.size
            for waiting in users:
                waiting.flights.append(flight)
            self._num_ahead += request.size
        if num_fetched:
            engine.metrics.add(requests=num_fetched, bytes_read=num_bytes)
        self._queue.extend(batch)

    def _land(self, waiting: _Waiting) -> None:
        """Wait for what brings a sample, and open all samples that it brings: their bytes are as warm as they get."""
        if len(waiting.flights) > 1:
            waiting.land(self._join(waiting))
            return
        (flight,) = waiting.flights
        users, flight.users = flight.users, []  # which know the flight: a circle would keep their memory
        fetched = self._fetch(flight)
        if isinstance(fetched, BadSampleError):
            for user in users:
                user.land(fetched)
            return
        view, base, crc = memoryview(fetched.data), flight.request.offset, fetched.crc32c
        for user in users:
            span = user.span
            begin = span.offset - base
            result = open_sample(span, view[begin : begin + span.size], crc)
            user.land(result if type(result) is dict else self._read_again(span, result))

    def _join(self, waiting: _Waiting) -> SpanResult:
        """Put a sample together that came in parts."""
        parts = []
        for flight in waiting.flights:
            flight.users.clear()
            fetched = self._fetch(flight)
            if isinstance(fetched, BadSampleError):
                return fetched
            parts.append(fetched.data)
        return self._read_again(waiting.span, open_sample(waiting.span, memoryview(b"".join(parts))))

    def _read_again(self, span: Span, result: SpanResult) -> SpanResult:
        """Return what a sample is when it is read once more, where its bytes seem to be damaged."""
        if isinstance(result, BadSampleError) and result.reason in ("crc_mismatch", "truncated"):
            again = self._engine().read_again(span)
            check_unchanged(span, again)
            result = open_sample(span, memoryview(again.data))
        return result

    def _fetch(self, flight: _Flight) -> Fetched | BadSampleError:
        """Return what a request brings, from a shard that is still the one that was indexed."""
        if isinstance(flight.future, Fetched):
            check_unchanged(flight.request, flight.future)
            return flight.future
        begun_s = time.perf_counter()
        try:
            fetched = self._engine().read_now(flight.request) if flight.future is None else flight.future.result()
        except (ReadCancelledError, CancelledError):
            raise StorageError(
                "The reader was closed while samples were still being read from it. Read to the end, or stop reading "
                "before closing."
            ) from None
        except NotFoundError as error:
            if not self._options.missing_is_bad:
                raise
            return BadSampleError("read", "missing_shard", f"{error} The sample is left out.")
        finally:
            self._waited_s += time.perf_counter() - begun_s
        check_unchanged(flight.request, fetched)
        return fetched
