"""From a plan to finished micro-batches, in one worker: read ahead, encode, collate.

Enters: the micro-batches that this worker owns, in plan order. Leaves: one `Delivery` for each of them, in the same
order. What is bad becomes a hole and a ledger entry; it never changes which micro-batch comes next.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from vlm_stream.errors import BadSampleError
from vlm_stream.ledger import BadSample
from vlm_stream.stream.position import Position
from vlm_stream.stream.raw import RawRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vlm_stream.plan import Dropped, Ref, Step
    from vlm_stream.storage import ReadTotals, Span, SpanReader, SpanResult
    from vlm_stream.stream.datasets import OpenDatasets
    from vlm_stream.stream.rows import RowBuilder

    Encode = Callable[[Ref, Mapping[str, memoryview]], Any]

__all__ = ["Delivery", "MicroBatch", "deliver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one rank consumes at once, before any byte of it was read."""

    step: Step
    micro: int
    rank: int
    replayed: bool = False
    """Looked up by itself, so that nothing is known of what came before: it has no state."""

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """Return the samples that the plan itself left out, named where they would have come."""
        return self.step.dropped if self.micro == self.step.micro_begin else ()

    def state(self) -> dict[str, Any] | None:
        """Return the cursor once every rank has consumed this micro-step."""
        return None if self.replayed else self.step.state_after(self.micro)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A finished micro-batch with what the loader must know of it."""

    step: int
    micro: int
    batch: dict[str, Any]
    behind: Position
    """Behind it; that of a replay has no cursor."""
    bad: tuple[BadSample, ...]
    num_samples: int
    """Samples planned into it, bad ones included."""
    num_tokens: int
    """Tokens of the samples in it."""
    num_planned_tokens: int
    """Tokens that the index promised."""
    num_rows: int
    """Rows of the batch, fillers included."""
    num_slots: int
    """Tokens of the batch, padding included."""
    seconds: dict[str, float]
    """Time spent waiting for bytes (`fetch`), in `encode` and in `collate`."""
    reads: ReadTotals
    """What the worker's reader has done since it began."""
    pid: int
    """The process that made it."""


class _Planned(NamedTuple):
    """A micro-batch whose bytes are on their way."""

    plan: MicroBatch
    rows: list[tuple[Ref, ...]]
    refs: list[Ref]
    """Of all rows, each once: a source that is repeated may bring a sample twice."""


def deliver(
    plans: Iterable[MicroBatch], datasets: OpenDatasets, reader: SpanReader, builder: RowBuilder | RawRows
) -> Iterator[Delivery]:
    """Yield a delivery for every planned micro-batch, while the reader fetches the bytes of those to come."""
    span_of = datasets.span if builder.pixels else datasets.text_span
    encode = _encoder(datasets, builder)

    def wanted() -> Iterator[tuple[_Planned, list[Span]]]:
        for plan in plans:
            rows = plan.step.refs(plan.rank, plan.micro)
            refs = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
            yield _Planned(plan, rows, refs), list(map(span_of, refs))

    waited_from = time.perf_counter()
    for planned, results in reader.read_groups(wanted()):
        waited = time.perf_counter() - waited_from
        delivery = _finish(planned, results, datasets, builder, encode, (waited, reader.metrics))
        del results  # else its memory could not be used for what comes next
        yield delivery
        del delivery
        waited_from = time.perf_counter()


def _finish(
    planned: _Planned,
    results: list[SpanResult],
    datasets: OpenDatasets,
    builder: RowBuilder | RawRows,
    encode: Encode,
    fetched: tuple[float, ReadTotals],
) -> Delivery:
    begin = time.perf_counter()
    plan, rows, refs = planned
    bad = [_ledger_entry(note.ref, _not_planned(note), datasets) for note in plan.dropped]
    read = dict(zip(refs, results, strict=True))
    encoded_rows: list[list[tuple[Ref, Any]]] = []
    for row in rows:
        samples = []
        for ref in row:
            content = read[ref]
            if isinstance(content, BadSampleError):  # not raised: its traceback would keep the batch
                bad.append(_ledger_entry(ref, content, datasets))
                continue
            try:
                samples.append((ref, encode(ref, content)))
            except BadSampleError as error:
                bad.append(_ledger_entry(ref, error, datasets))
        encoded_rows.append(samples)
    encoded = time.perf_counter()
    batch, overflowed = builder.collate([[sample for _, sample in samples] for samples in encoded_rows])
    bad += [_ledger_entry(encoded_rows[row][position][0], reason, datasets) for row, position, reason in overflowed]
    if builder.with_refs:
        bad_names = {(line.source, line.shard, line.sample) for line in bad}
        names = [[datasets.name(ref) for ref, _ in samples] for samples in encoded_rows]
        batch["refs"] = [[name for name in row_names if name not in bad_names] for row_names in names]
    num_planned, raw = plan.step.tokens(plan.rank, plan.micro), isinstance(builder, RawRows)
    return Delivery(
        step=plan.step.index,
        micro=plan.micro,
        batch=batch,
        behind=Position(plan.state),
        bad=tuple(bad),
        num_samples=len(refs) + len(plan.dropped),
        num_tokens=num_planned if raw else sum(len(sample["input_ids"]) for row in encoded_rows for _, sample in row),
        num_planned_tokens=num_planned,
        num_rows=len(rows),
        num_slots=ids.numel() if isinstance(ids := batch.get("input_ids"), Tensor) else 0,
        seconds={"fetch": fetched[0], "encode": encoded - begin, "collate": time.perf_counter() - encoded},
        reads=fetched[1],
        pid=os.getpid(),
    )


def _encoder(datasets: OpenDatasets, builder: RowBuilder | RawRows) -> Encode:
    """Return what makes a sample of its members."""
    fields = [manifest.fields for manifest in datasets.manifests]
    if isinstance(builder, RawRows):
        return lambda ref, members: builder.encode(datasets.name(ref), members, fields[ref.source])
    if builder.pixels:
        return lambda ref, members: builder.encode(members, fields[ref.source])
    return lambda ref, members: builder.encode_text(members, fields[ref.source], *datasets.contents(ref))


def _not_planned(note: Dropped) -> BadSampleError:
    return BadSampleError(
        "fit",
        note.reason,
        f"it has {note.tokens} tokens, {note.vision_tokens} of them for images and videos: more than a row may hold, "
        f"so it is left out. Raise pack_size or max_length to train on it",
    )


def _ledger_entry(ref: Ref, error: BadSampleError, datasets: OpenDatasets) -> BadSample:
    source, shard, key = datasets.name(ref)
    return BadSample(
        source=source,
        sample=key,
        stage=error.stage,
        reason=error.reason,
        detail=str(error),
        shard=shard,
        offset=datasets.span(ref).offset,
    )
