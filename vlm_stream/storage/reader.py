"""Spans in plan order in, samples in the same order out: the reader that pipelines hold.

It owns what a process needs for reading (threads, connections, counters) and knows when to begin anew: after a fork, or
behind `close`. How far it reads ahead is in `read_ahead.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from vlm_stream.storage.engine import Engine
from vlm_stream.storage.metrics import ReadMetrics, ReadTotals
from vlm_stream.storage.options import ReadOptions
from vlm_stream.storage.read_ahead import ReadAhead, SpanResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from vlm_stream.storage.options import StoreOptions
    from vlm_stream.storage.store import Store
    from vlm_stream.storage.values import Span

__all__ = ["SpanReader", "SpanResult"]

T = TypeVar("T")


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
        """Yield `(tag, members)` or `(tag, BadSampleError)` for each pair, in the order of the pairs; see below."""
        for tag, (result,) in self.read_groups((tag, (span,)) for tag, span in pairs):
            yield tag, result

    def read_groups(self, groups: Iterable[tuple[T, Sequence[Span]]]) -> Iterator[tuple[T, list[SpanResult]]]:
        """Yield `(tag, results)` for each group, in the order of the groups: the members of each span, or its error.

        Raises:
            ChangedObjectError: A shard was replaced by another than the manifest describes. (One that was cut short
                gives bad samples.)
            NotFoundError: A shard is not there, and `missing_is_bad` is off.
            StorageError: Bytes could not be read, after all retries.
        """
        ahead = ReadAhead(groups, self._running_engine, self._options)
        try:
            while (group := ahead.next_group()) is not None:
                yield group
                del group  # else its memory could not be used for the next one
        finally:
            ahead.close()

    def _running_engine(self) -> Engine:
        self._renew_after_fork()
        if self._engine is None:
            self._engine = Engine(self._options, self._given_stores, self._store_options, self._metrics)
        return self._engine

    def _renew_after_fork(self) -> None:
        """Leave behind what a child cannot use: the parent's threads, and a lock that one of them may have held."""
        if self._pid != os.getpid():
            self._pid, self._engine, self._metrics = os.getpid(), None, ReadMetrics()
