"""From a plan to finished micro-batches, in one worker: read ahead, encode, collate.

Enters: the micro-batches that this worker owns, in plan order. Leaves: one `Delivery` for each of them, in the same
order. What is bad becomes a hole and a ledger entry; it never changes which micro-batch comes next.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor

from vlm_stream.encode import IGNORE
from vlm_stream.errors import BadSampleError, blame_sample
from vlm_stream.ledger import BadSample
from vlm_stream.stream.label_counts import add_item_count
from vlm_stream.stream.position import Position
from vlm_stream.stream.raw import RawRows
from vlm_stream.watch import begin_sample, end_sample, reason_to_skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vlm_stream.plan import Dropped, Ref, Step
    from vlm_stream.storage import ReadTotals, Span, SpanReader, SpanResult
    from vlm_stream.stream.datasets import OpenDatasets
    from vlm_stream.stream.rows import RowBuilder

    Details = tuple[Any, ...]
    """What the encoding of a sample needs beside its members."""

__all__ = ["Delivery", "MicroBatch", "deliver"]

_MAX_AT_ONCE: Final = 16


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
    num_labels: int
    """Tokens of the batch that are learned."""
    num_planned_labels: int | None
    """Those that the index promised, bad samples included; None: it does not know, or a sample was cut."""
    num_step_labels: int | None
    """Those of the whole step, over all ranks and micro-batches: the batch's `num_items_in_batch`."""
    num_in_step: int
    """Micro-batches of the step, over all ranks."""
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
    details: list[Details]
    """Of the samples of all rows, one behind the other."""


def deliver(
    plans: Iterable[MicroBatch], datasets: OpenDatasets, reader: SpanReader, builder: RowBuilder | RawRows
) -> Iterator[Delivery]:
    """Yield a delivery for every planned micro-batch, while the reader fetches the bytes of those to come."""
    waited_from = time.perf_counter()
    for planned, results in reader.read_groups(_wanted(plans, datasets, builder)):
        waited = time.perf_counter() - waited_from
        delivery = _finish(planned, results, datasets, builder, (waited, reader.metrics))
        del results  # else its memory could not be used for what comes next
        yield delivery
        del delivery
        waited_from = time.perf_counter()


def _wanted(
    plans: Iterable[MicroBatch], datasets: OpenDatasets, builder: RowBuilder | RawRows
) -> Iterator[tuple[_Planned, list[Span]]]:
    """Yield each micro-batch with where its samples lie, looked up for several at once because that is quicker."""
    planned = iter(plans)
    num_at_once = 1  # else the first would wait for those behind it
    while some := list(itertools.islice(planned, num_at_once)):
        num_at_once = min(4 * num_at_once, _MAX_AT_ONCE)
        rows_of = [plan.step.refs(plan.rank, plan.micro) for plan in some]
        refs = [ref for rows in rows_of for row in rows for ref in row]
        spans = iter(datasets.spans(refs) if builder.pixels else map(datasets.text_span, refs))
        details = iter(_details(refs, datasets, builder))
        for plan, rows in zip(some, rows_of, strict=True):
            count = sum(map(len, rows))
            yield _Planned(plan, rows, list(itertools.islice(details, count))), list(itertools.islice(spans, count))


def _details(refs: Sequence[Ref], datasets: OpenDatasets, builder: RowBuilder | RawRows) -> Iterable[Details]:
    fields = [datasets.manifests[ref.source].fields for ref in refs]
    if isinstance(builder, RawRows):
        return zip(fields, datasets.names(refs), strict=True)
    if builder.pixels:
        return zip(fields, strict=True)
    return ((own, *datasets.contents(ref)) for own, ref in zip(fields, refs, strict=True))


def _encoding(builder: RowBuilder | RawRows) -> Callable[..., Any]:
    """Return what makes a sample of its members and its details."""
    return builder.encode if isinstance(builder, RawRows) or builder.pixels else builder.encode_text


def _finish(
    planned: _Planned,
    results: list[SpanResult],
    datasets: OpenDatasets,
    builder: RowBuilder | RawRows,
    fetched: tuple[float, ReadTotals],
) -> Delivery:
    begin = time.perf_counter()
    plan, rows, details = planned
    bad = [_ledger_entry(note.ref, _not_planned(note), datasets) for note in plan.dropped]
    encode = _encoding(builder)
    given = zip(results, details, strict=True)
    encoded_rows: list[list[Any]] = []
    encoded_refs: list[list[Ref]] = []
    for row in rows:
        samples, refs = [], []
        for ref, (members, own) in zip(row, given, strict=False):
            sample = _make_sample(encode, ref, members, own)
            if isinstance(sample, BadSampleError):
                bad.append(_ledger_entry(ref, sample, datasets))
                continue
            samples.append(sample)
            refs.append(ref)
        encoded_rows.append(samples)
        encoded_refs.append(refs)
    encoded = time.perf_counter()
    batch, overflowed = builder.collate(encoded_rows)
    bad += [_ledger_entry(encoded_refs[row][position], reason, datasets) for row, position, reason in overflowed]
    if builder.with_refs:
        bad_names = {(line.source, line.shard, line.sample) for line in bad}
        names = [list(map(datasets.name, refs)) for refs in encoded_refs]
        batch["refs"] = [[name for name in row_names if name not in bad_names] for row_names in names]
    num_labels = int((labels != IGNORE).sum()) if isinstance(labels := batch.get("labels"), Tensor) else 0
    add_item_count(batch, plan.step.total_labels, num_labels)
    num_planned, raw = plan.step.tokens(plan.rank, plan.micro), isinstance(builder, RawRows)
    return Delivery(
        step=plan.step.index,
        micro=plan.micro,
        batch=batch,
        behind=Position(plan.state),
        bad=tuple(bad),
        num_samples=len(results) + len(plan.dropped),
        num_tokens=num_planned if raw else sum(len(sample["input_ids"]) for row in encoded_rows for sample in row),
        num_planned_tokens=num_planned,
        num_labels=num_labels,
        num_planned_labels=plan.step.labels(plan.rank, plan.micro),
        num_step_labels=plan.step.total_labels,
        num_in_step=plan.step.shape.world_size * plan.step.shape.micro_batches,
        num_rows=len(rows),
        num_slots=ids.numel() if isinstance(ids := batch.get("input_ids"), Tensor) else 0,
        seconds={"fetch": fetched[0], "encode": encoded - begin, "collate": time.perf_counter() - encoded},
        reads=fetched[1],
        pid=os.getpid(),
    )


def _make_sample(encode: Callable[..., Any], ref: Ref, members: Any, details: Details) -> Any:
    """Return the encoded sample, or why there is none: whatever its bytes lead to costs this sample and no other."""
    if isinstance(members, BadSampleError):  # not raised: its traceback would keep the batch
        return members
    if skipped := reason_to_skip(ref):
        return BadSampleError("decode", "killed_worker", skipped)
    begin_sample(ref)
    try:
        return encode(members, *details)
    except Exception as error:
        return blame_sample(error, "encode", "unexpected_error", "the sample cannot be encoded").bare()
    finally:
        end_sample()


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
