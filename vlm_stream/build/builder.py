"""A blueprint becomes a batch: fetch its bytes, encode each sample, join the rows.

Enters: a `BuildConfig` once, then blueprints. Leaves: a `Delivery` for each. A builder keeps connections, the processor
and reused memory, and no state: any builder builds any blueprint, in any order, with the same result. What is bad
becomes a hole and a ledger entry.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from vlm_stream.build.collators import make_collator
from vlm_stream.build.delivery import Delivery, add_item_count
from vlm_stream.build.rows import RawRows, RowBuilder
from vlm_stream.encode import IGNORE, Encoder
from vlm_stream.errors import BadSampleError, blame_sample
from vlm_stream.ledger import BadSample
from vlm_stream.processors import open_processor
from vlm_stream.storage import SpanReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlm_stream.blueprint import Blueprint, Piece, SampleRef
    from vlm_stream.format import FieldMap
    from vlm_stream.options import StreamOptions
    from vlm_stream.storage import Reading, SpanResult
    from vlm_stream.tokens import FrameRule

__all__ = ["BuildConfig", "Builder", "Watch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """What all batches of a run have in common; it may be pickled."""

    processor: Any
    """A processor, the name or path of one, or None: batches hold `RawSample`s."""
    options: StreamOptions
    frames: FrameRule
    """Which frames of videos are read."""
    sources: tuple[tuple[str, FieldMap], ...]
    """Name of each source, and how members become a conversation."""

    def open(self, watch: Watch | None = None) -> Builder:
        """Return a builder."""
        return Builder(self, watch)

    def modules(self) -> list[str]:
        """Return what a process imports to build: its parent may do so once for all."""
        if self.processor is None or isinstance(self.processor, str | os.PathLike | dict):
            return [__name__]
        return [__name__, type(self.processor).__module__]


class Watch(Protocol):
    """Is told which sample is worked on, so that its name outlives the process."""

    def begin(self, ref: SampleRef) -> None:
        """Note a sample."""

    def end(self) -> None:
        """Note that it is done."""


class _Nobody:
    def begin(self, ref: SampleRef) -> None:
        pass

    def end(self) -> None:
        pass


class Builder:
    """Builds batches; use it in a `with` block."""

    def __init__(self, config: BuildConfig, watch: Watch | None = None) -> None:
        """Load the processor and prepare the family's encoding and collation."""
        options = config.options
        processor = open_processor(config.processor)
        self._sources = config.sources
        self._watch = watch or _Nobody()
        self._with_refs = options.with_refs
        self._rows: RowBuilder | RawRows
        if processor is None:
            self._rows = RawRows(options)
        else:
            encoder = Encoder(processor, options.encode(config.frames))
            self._rows = RowBuilder(encoder, make_collator(processor, options), pixels=bool(options.pixels))
        self._reader = SpanReader(options.read(), options.store)

    def __enter__(self) -> Builder:
        """Return the builder itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End the reader's threads and connections."""
        self._reader.close()

    def begin(self, blueprint: Blueprint) -> Reading:
        """Start to fetch the bytes of a batch."""
        return self._reader.begin([piece.span for row in blueprint.rows for piece in row])

    def finish(
        self, blueprint: Blueprint, reading: Reading, skipped: Mapping[SampleRef, str] | None = None
    ) -> Delivery:
        """Wait for the bytes and build the batch; `skipped` samples are left out, each for the reason given."""
        begin = time.perf_counter()
        results = iter(reading.results())
        fetched = time.perf_counter()
        bad = list(blueprint.dropped)
        rows: list[list[Any]] = []
        pieces: list[list[Piece]] = []
        for row in blueprint.rows:
            rows.append([])
            pieces.append([])
            for piece in row:
                sample = self._sample(piece, next(results), skipped or {})
                if isinstance(sample, BadSampleError):
                    bad.append(self._entry(piece, sample))
                else:
                    rows[-1].append(sample)
                    pieces[-1].append(piece)
        encoded = time.perf_counter()
        batch, misfits = self._rows.collate(rows)
        bad += [self._entry(pieces[row][position], error) for row, position, error in misfits]
        if self._with_refs:
            misfit = {(row, position) for row, position, _ in misfits}
            batch["refs"] = [
                [self._name(piece) for at, piece in enumerate(row) if (number, at) not in misfit]
                for number, row in enumerate(pieces)
            ]
        num_labels = int((labels != IGNORE).sum()) if isinstance(labels := batch.get("labels"), Tensor) else 0
        add_item_count(batch, blueprint.step_labels, num_labels)
        planned = blueprint.work.tokens
        return Delivery(
            name=blueprint.name,
            batch=batch,
            bad=tuple(bad),
            num_samples=blueprint.work.samples + len(blueprint.dropped),
            num_tokens=self._rows.count_tokens(rows, planned),
            num_planned_tokens=planned,
            num_labels=num_labels,
            num_planned_labels=blueprint.labels,
            num_step_labels=blueprint.step_labels,
            num_in_step=blueprint.num_in_step,
            num_rows=len(blueprint.rows),
            num_slots=ids.numel() if isinstance(ids := batch.get("input_ids"), Tensor) else 0,
            num_bytes=_num_bytes(batch),
            seconds={"fetch": fetched - begin, "encode": encoded - fetched, "collate": time.perf_counter() - encoded},
            reads=self._reader.metrics,
            pid=os.getpid(),
        )

    def build(self, blueprint: Blueprint) -> Delivery:
        """Fetch and build at once."""
        return self.finish(blueprint, self.begin(blueprint))

    def _sample(self, piece: Piece, result: SpanResult, skipped: Mapping[SampleRef, str]) -> Any:
        """Return the encoded sample, or why there is none: what its bytes lead to costs this sample and no other."""
        if isinstance(result, BadSampleError):  # not raised: its traceback would keep the batch
            return result
        if piece.ref in skipped:
            return BadSampleError("decode", "killed_worker", skipped[piece.ref])
        source, fields = self._sources[piece.ref[0]]
        self._watch.begin(piece.ref)
        try:
            return self._rows.encode(result, fields, piece, source)
        except Exception as error:
            return blame_sample(error, "encode", "unexpected_error", "the sample cannot be encoded").bare()
        finally:
            self._watch.end()

    def _name(self, piece: Piece) -> tuple[str, str, str, str, str | None]:
        """Return source, shard, key, the meta file's entry, and the sample's own id."""
        return self._sources[piece.ref[0]][0], piece.span.path, piece.key, piece.entry, piece.id

    def _entry(self, piece: Piece, error: BadSampleError) -> BadSample:
        source, shard, key, entry, own_id = self._name(piece)
        return BadSample(
            source=source,
            sample=key,
            stage=error.stage,
            reason=error.reason,
            detail=str(error),
            shard=shard,
            offset=piece.offset,
            entry=entry,
            id=own_id or "",
        )


def _num_bytes(value: Any) -> int:
    """Return the memory of the tensors and bytes in a batch."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_num_bytes, value))
    members = getattr(value, "members", None)
    return _num_bytes(members) if isinstance(members, dict) else 0
