"""A blueprint becomes a batch: fetch its bytes, encode each sample, join the rows.

Enters: a `BuildConfig` once, then blueprints. Leaves: a `Delivery` for each. A builder keeps connections, the processor
and reused memory, and no state: any builder builds any blueprint, in any order, with the same result. What is bad
becomes a hole and a ledger entry.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from vlm_stream.build.collators import choose_family, make_collator
from vlm_stream.build.delivery import Delivery, add_item_count
from vlm_stream.build.digest import digest_of
from vlm_stream.build.rows import ExampleRows, RawRows, RowBuilder
from vlm_stream.clips import PickedClip
from vlm_stream.encode import IGNORE, Encoder
from vlm_stream.errors import BadSampleError, blame_sample
from vlm_stream.ledger import BadSample
from vlm_stream.processors import open_processor
from vlm_stream.storage import SpanReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vlm_stream.blueprint import Blueprint, Piece, SampleRef
    from vlm_stream.collate import Family
    from vlm_stream.format import FieldMap
    from vlm_stream.options import StreamOptions
    from vlm_stream.storage import Reading, SpanResult
    from vlm_stream.tokens import FrameRule

logger = logging.getLogger(__name__)


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
    family: Family | None = None
    """What the processor's family wants; None: it is looked up where batches are built."""
    text_key: str = ""
    """Of the text that conversion has tokenised for this processor."""
    decode_threads: int = 1
    """Most threads of a builder that decode one clip."""

    def open(self, watch: Watch | None = None) -> Builder:
        """Return a builder."""
        return Builder(self, watch)

    def digest(self, *, with_reading: bool = False) -> str | None:
        """Return what identifies all that batches of one name depend on; None: that cannot be told.

        What decides only how bytes are read, and how far ahead, is left out, unless it is asked for.
        """
        if with_reading:
            return digest_of(self)
        bytes_of = ("prefetch_bytes", "cache_bytes", "index_bytes", "bytes_per_s")
        how = (*bytes_of, "max_inflight", "requests_per_s", "cache_dir", "store")
        defaults: dict[str, Any] = {each.name: each.default for each in fields(self.options) if each.name in how}
        return digest_of(replace(self, options=replace(self.options, **defaults), decode_threads=1))

    def modules(self) -> list[str]:
        """Return what a process imports to build: its parent may do so once for all."""
        if self.processor is None or isinstance(self.processor, str | os.PathLike | dict):
            return [__name__]
        return [__name__, type(self.processor).__module__]


def encodes_samples(family: Family, options: StreamOptions) -> bool:
    """Tell whether samples are encoded here, and not by a function that takes the bytes of their media."""
    return callable(options.collate) or not family.only_function


class Watch(Protocol):
    """Is told which sample is worked on, so that its name outlives the process."""

    def begin(self, ref: SampleRef) -> None:
        """Note a sample."""

    def end(self) -> None:
        """Note that it is done."""


class Builder:
    """Builds batches; use it in a `with` block."""

    def __init__(self, config: BuildConfig, watch: Watch | None = None) -> None:
        """Load the processor and prepare the family's encoding and collation."""
        options = config.options
        processor = open_processor(config.processor)
        self._sources = config.sources
        self._watch = watch
        self._with_refs = options.with_refs
        self._threads = config.decode_threads
        self._has_told = False
        self._rows: RowBuilder | RawRows
        if processor is None:
            self._rows = RawRows(options)
        else:
            family = config.family or choose_family(processor, options)
            encoder = Encoder(processor, options.encode(config.frames), family.steps_for(processor))
            kind = RowBuilder if encodes_samples(family, options) else ExampleRows
            self._rows = kind(
                encoder,
                make_collator(processor, options, family),
                pixels=bool(options.pixels),
                text_key=config.text_key,
            )
        self._reader_name = uuid.uuid4().hex
        self._reader = SpanReader(options.read(), options.store, have_answered=True)

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
        pieces = [piece for row in blueprint.rows for piece in row]
        texts = [span for piece in pieces for span in piece.text]
        return self._reader.begin([span for piece in pieces for span in piece.reads], len(pieces), texts)

    def finish(
        self, blueprint: Blueprint, reading: Reading, skipped: Mapping[SampleRef, str] | None = None
    ) -> Delivery:
        """Wait for the bytes and build the batch; `skipped` samples are left out, each for the reason given."""
        begin = time.perf_counter()
        found = reading.results()
        results = iter(found)
        texts = iter(found[sum(len(piece.reads) for row in blueprint.rows for piece in row) :])
        fetched = time.perf_counter()
        bad = list(blueprint.dropped)
        rows: list[list[Any]] = []
        pieces: list[list[Piece]] = []
        for row in blueprint.rows:
            rows.append([])
            pieces.append([])
            for piece in row:
                result = join_parts(piece, results, self._threads)
                sample = self._sample(piece, result, skipped or {}, next(texts) if piece.text else None)
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
            reader=self._reader_name,
        )

    def build(self, blueprint: Blueprint) -> Delivery:
        """Fetch and build at once."""
        return self.finish(blueprint, self.begin(blueprint))

    def _sample(
        self, piece: Piece, result: SpanResult, skipped: Mapping[SampleRef, str], text: SpanResult | None
    ) -> Any:
        """Return the encoded sample, or why there is none: what its bytes lead to costs this sample and no other."""
        if isinstance(result, BadSampleError):
            return result
        if piece.ref in skipped:
            return BadSampleError("decode", "killed_worker", skipped[piece.ref])
        if self._watch is not None:
            self._watch.begin(piece.ref)
        try:
            sample = self._encode(piece, result, text)
            if piece.clips and isinstance(sample, BadSampleError) and sample.stage == "decode":
                sample = self._encode(piece, self._read_whole(piece, sample))
            return sample
        finally:
            if self._watch is not None:
                self._watch.end()

    def _encode(self, piece: Piece, result: SpanResult, text: SpanResult | None = None) -> Any:
        if isinstance(result, BadSampleError):  # not raised: its traceback would keep the batch
            return result
        source, fields = self._sources[piece.ref[0]]
        try:
            return self._rows.encode(result, fields, piece, source, text)
        except Exception as error:
            return blame_sample(error, "encode", "unexpected_error", "the sample cannot be encoded").bare()

    def _read_whole(self, piece: Piece, error: BadSampleError) -> SpanResult:
        """Read a sample as those without tables are: its clips could not be decoded from the ranges of their frames."""
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "a clip cannot be decoded from the ranges of its frames (%s), so its sample is read once more and "
                "whole; if this is so for many, look for this builder's version of av, or make the tables again",
                error,
            )
        return self._reader.begin([piece.span], 0).results()[0]

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


def join_parts(piece: Piece, results: Iterator[SpanResult], threads: int = 1) -> Any:
    """Take what was read for a piece; return its members, or what is wrong with them. Clips get so many threads.

    Members that were read by ranges are put together again: small files as they are, clips as the frames that were cut.
    """
    found = [next(results) for _ in piece.reads]
    if not piece.parts:
        return found[0]
    num_gops = sum(len(run.ranges) for clip in piece.clips for run in clip.cut.runs)
    rest, gops = found[: len(found) - num_gops], iter(found[len(found) - num_gops :])
    members: dict[str, Any] = {}
    for part in rest:
        if isinstance(part, BadSampleError):
            return part
        members |= part
    for clip in piece.clips:
        ranges: list[list[memoryview]] = []
        for run in clip.cut.runs:
            ranges.append([])
            for seconds in run.seconds:
                gop = next(gops)
                if isinstance(gop, BadSampleError):
                    return BadSampleError(gop.stage, gop.reason, f"{clip.name} from {seconds:.2f} s on: {gop}")
                ranges[-1].append(gop[""])
        spans = {(start, end): (first, frames) for start, end, first, frames in clip.spans}
        members[clip.name] = PickedClip(clip.cut, clip.facts, ranges, spans, threads=threads)
    return members


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
