"""The unit of work of a conversion: one shard, from its records to its objects in the store.

Enters: `ShardTask` (a number and record numbers) and the job's `ShardContext`. Leaves: tar, index and a note that both
are whole, in the store, in this order; and the same note as a value. A pure function of its records: no clock, no
host, no worker number. It runs in any process of any engine.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Final

import numpy as np

from vlm_stream.convert.counting import SampleCounter, open_counter
from vlm_stream.convert.job import JOB_FOLDER, Ints, ShardPart, bad_sample, is_local, part_name, sample_key, shard_name
from vlm_stream.convert.media_bytes import MediaReader, MediaRules
from vlm_stream.convert.options import ShardOptions
from vlm_stream.convert.processes import is_left_out, working_on
from vlm_stream.convert.rows import SampleCounts, ShardWriter, check_fits_index, write_all
from vlm_stream.convert.sample import Sample, build_sample, sample_bytes_bound
from vlm_stream.errors import BadSampleError, StorageError, blame_sample
from vlm_stream.format import clips_name, index_name
from vlm_stream.ledger import BadSample
from vlm_stream.sources import Record, SourceGroup
from vlm_stream.storage import Store, StoreOptions, open_store

_PROBE_SECONDS: Final = 0.5
_NUM_PROBES: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class ShardTask:
    """One shard to be written."""

    number: int
    records: Ints
    """Record numbers, in the order of the shard."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardContext:
    """What all tasks of a job share."""

    source: SourceGroup
    out: str
    options: ShardOptions

    def __call__(self, tasks: Sequence[ShardTask]) -> list[ShardPart]:
        self.counter.remember_in(self.out)  # what other processes have measured
        parts = [write_shard(self, task) for task in tasks]
        self.counter.remember_in(self.out)
        return parts

    @property
    def counter(self) -> SampleCounter:
        return open_counter(self.options.processor, trust_remote_code=self.options.trust_remote_code)

    @property
    def reader(self) -> MediaReader:
        return _open_reader(self.options.media_rules, self.options.store)

    def build(self, record: Record) -> tuple[Sample, SampleCounts]:
        """Return the sample and what its text costs.

        Raises:
            BadSampleError: It cannot be used.
        """
        return make_sample(record, self.reader, self.counter, exif_rotate=self.options.exif_rotate)


def make_sample(
    record: Record, reader: MediaReader, counter: SampleCounter, *, exif_rotate: bool = False
) -> tuple[Sample, SampleCounts]:
    """Return the sample of a record, with the tokens of its text if they are worth keeping, and what its text costs."""
    sample = build_sample(record, reader, exif_rotate=exif_rotate)
    counts, tokens = counter.count_and_keep(sample.conversation, sample.sizes, record.extras.get("_text_tokens"))
    check_fits_index(counts.text_tokens, sample.sizes)
    return sample.with_tokens(tokens), counts


@dataclass(frozen=True, slots=True, eq=False)
class RecordSizer:
    """Measures `chunk` records from a given one on: at most how many bytes each takes in a tar."""

    context: ShardContext
    chunk: int

    def __call__(self, begin: int) -> tuple[int, Ints]:
        end = min(begin + self.chunk, len(self.context.source))
        return begin, np.array([self._measure(number) for number in range(begin, end)], dtype=np.int64)

    def _measure(self, number: int) -> int:
        if is_left_out(number):
            return 0
        try:
            with working_on(number):
                return sample_bytes_bound(self.context.source.read(number), self.context.reader)
        except Exception as error:
            blame_sample(error, "convert", "bad_record", "the record cannot be measured")
            return 0  # it will not be in any shard


def seconds_per_record(context: ShardContext) -> float:
    """Return what a record costs, from a few of them, spread over the input: whether further processes would pay.

    Each is timed twice and the shorter time counts: the first may load libraries, and others use the machine.
    """
    times = []
    begin = time.perf_counter()
    for number in np.linspace(0, len(context.source) - 1, _NUM_PROBES).astype(int).tolist():
        ends = [time.perf_counter()]
        for _ in range(2):
            try:
                context.build(context.source.read(number))
            except Exception as error:
                blame_sample(error, "convert", "bad_record", "the record cannot be made a sample")
            ends.append(time.perf_counter())
        times.append(min(ends[1] - ends[0], ends[2] - ends[1]))
        if ends[2] - begin > _PROBE_SECONDS:
            break
    return sum(times) / len(times)


def write_shard(context: ShardContext, task: ShardTask) -> ShardPart:
    """Write one shard and its index; return what the manifest has to know."""
    store = open_store(context.out, context.options.store)
    name = shard_name(task.number)
    with _staged(store, name) as file:
        writer = ShardWriter(file)
        for record in task.records.tolist():
            with working_on(record):
                _add_record(writer, context, record)
        crc32c = writer.finish()
    etag = None if is_local(store) else store.head(name).etag
    facts = {"num_bytes": writer.num_bytes, "crc32c": crc32c, "etag": etag}
    part = writer.write(partial(_put, store), task.number, name, **facts)
    _put(store, part_name(task.number), part.to_json().encode())
    return part


@cache
def _open_reader(rules: MediaRules, options: StoreOptions | None) -> MediaReader:
    """Return this process's reader: its connections outlive a shard."""
    return MediaReader(rules, options)


def _add_record(writer: ShardWriter, context: ShardContext, number: int) -> None:
    """Append one record to the shard, or note why not."""
    if is_left_out(number):
        name, origin = _locate(context.source, number)
        detail = (
            "every process that worked on it died, so it is left out. Decode its media by themselves to see why, and "
            "leave it out of the data or write its media again"
        )
        writer.bad.append(_bad(name, origin, origin, BadSampleError("convert", "killed_process", detail)))
        return
    try:
        record = context.source.read(number)
    except Exception as error:  # a record can hold anything in any place
        name, origin = _locate(context.source, number)
        writer.bad.append(_bad(name, origin, origin, error))
        return
    name, own_id, origin = record.source, record.id, record.origin
    try:
        sample, counts = context.build(record)
    except Exception as error:
        writer.bad.append(_bad(name, own_id, origin, error))
        return
    for note in record.extras.get("_mismatches", ()):
        reason, _, detail = str(note).partition(": ")
        kept = BadSample(source=name, sample=own_id, origin=origin, stage="kept", reason=reason, detail=detail)
        writer.bad.append(kept)
    writer.add(sample_key(number), sample, counts)


def _bad(source: str, sample: str, origin: str, error: Exception) -> BadSample:
    blamed = blame_sample(error, "convert", "bad_record", "the record cannot be made a sample")
    return bad_sample(source, sample, blamed, origin=origin)


def _locate(source: SourceGroup, number: int) -> tuple[str, str]:
    """Return entry and `file:line` of a record that cannot be read, as far as its source knows them."""
    member, own = source.locate(number)
    return member.name, member.origin(own) if hasattr(member, "origin") else sample_key(number)


def _put(store: Store, name: str, data: bytes) -> None:
    """Let bytes appear under a name, whole.

    A folder's own `put` waits for the disk, twice; shards wait for it once, together, before the manifest is written.
    """
    if not is_local(store):
        store.put(name, data)
        return
    with _staged(store, name) as file:
        write_all(file.fileno(), data)


@contextlib.contextmanager
def _staged(store: Store, name: str) -> Iterator[IO[bytes]]:
    """Give an unfinished file: beside its target where a rename can finish it, else in the temp folder.

    It appears under its name, whole, when the block ends well.
    """
    folder, mode = Path(tempfile.gettempdir()), 0o600
    if is_local(store):
        folder, mode = Path(store.root, JOB_FOLDER), 0o666
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{posixpath.basename(name)}.{secrets.token_hex(8)}.tmp"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", buffering=0) as file:
            yield file
        if is_local(store):
            path.replace(Path(store.root, name))
        else:
            store.put(name, path)
    except OSError as error:
        raise StorageError(
            f"{name} could not be written ({error.strerror or error}); what is finished is kept. "
            f"Free some space in {folder}, and convert the same again to go on."
        ) from error
    finally:
        path.unlink(missing_ok=True)


def flush_in_background(folder: str, parts: Iterable[ShardPart], *, kept: Iterable[int] = ()) -> Iterator[ShardPart]:
    """Pass finished shards on, and fsync each of them in the background; end when all of them are on disk.

    Writers do not wait for the disk: while one shard is flushed, the next is written.

    Args:
        folder: Where the shards are.
        parts: Shards that are being finished.
        kept: Numbers of shards that an earlier run has finished, but perhaps not flushed.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="flush")
    try:
        waiting = [pool.submit(_flush, folder, number) for number in kept]
        for part in parts:
            waiting.append(pool.submit(_flush, folder, part.number))
            yield part
        for flushed in waiting:
            flushed.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _flush(folder: str, number: int) -> None:
    tar = shard_name(number)
    try:
        for name in (tar, clips_name(tar), index_name(tar)):
            if name == clips_name(tar) and not Path(folder, name).exists():
                continue
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        # The system says so once and may forget the bytes: the shard must not count as finished.
        Path(folder, part_name(number)).unlink(missing_ok=True)
        raise StorageError(
            f"{tar} could not be brought to disk ({error.strerror or error}), so it will be written again. "
            f"Check the disk and its free space, and convert the same again to go on."
        ) from error
