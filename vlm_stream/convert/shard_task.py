"""The unit of work of a conversion: one shard, from its records to its objects in the store.

Enters: `ShardTask` (a number and record numbers) and the job's `ShardContext`. Leaves: tar, index and a note that both
are whole, in the store, in this order; and the same note as a value. A pure function of its records: no clock, no
host, no worker number. It runs in any process of any engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import posixpath
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vlm_stream.convert.counting import SampleCounter, open_counter
from vlm_stream.convert.layout import JOB_FOLDER, part_name, sample_key, shard_name
from vlm_stream.convert.media_bytes import MediaReader
from vlm_stream.convert.rows import check_fits_index, encode_index
from vlm_stream.convert.sample import build_sample
from vlm_stream.convert.writer import ShardWriter, write_all
from vlm_stream.errors import StorageError, blame_sample
from vlm_stream.format import ShardEntry, Totals, describe_shard, index_name
from vlm_stream.ledger import BadSample
from vlm_stream.storage import open_store, scheme_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

    from vlm_stream.sources import RecordSource
    from vlm_stream.storage import Store, StoreOptions

__all__ = ["ShardContext", "ShardPart", "ShardTask", "is_local", "write_shard"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ShardTask:
    """One shard to be written."""

    number: int
    records: npt.NDArray[np.int64]
    """Record numbers, in the order of the shard."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardContext:
    """What all tasks of a job share."""

    source: RecordSource
    out: str
    processor: str | None = None
    trust_remote_code: bool = False
    confine_media: bool = False
    store: StoreOptions | None = None

    def __call__(self, task: ShardTask) -> ShardPart:
        """Write one shard."""
        return write_shard(self, task)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """One finished shard: its manifest entry and what was bad in it."""

    number: int
    entry: ShardEntry
    bad: tuple[BadSample, ...] = field(default=())

    def to_json(self) -> str:
        """Return the note that is kept beside the shard until the job ends."""
        data = {"entry": asdict(self.entry), "number": self.number, "bad": [bad.to_json() for bad in self.bad]}
        return json.dumps(data, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> ShardPart:
        """Read what `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        entry = ShardEntry(**(data["entry"] | {"totals": Totals(**data["entry"]["totals"])}))
        return cls(number=data["number"], entry=entry, bad=tuple(map(BadSample.from_json, data["bad"])))


def write_shard(context: ShardContext, task: ShardTask) -> ShardPart:
    """Write one shard and its index; return what the manifest has to know."""
    store = open_store(context.out, context.store)
    name = shard_name(task.number)
    counter = open_counter(context.processor, trust_remote_code=context.trust_remote_code)
    reader = _open_reader(context.confine_media, context.store)
    bad: list[BadSample] = []
    with _staged(store, name) as file:
        writer = ShardWriter(file)
        for record in task.records.tolist():
            _add_record(writer, context.source, record, reader, counter, bad)
        crc32c = writer.finish()
    index = encode_index(writer.rows)
    _put(store, index_name(name), index)
    etag = None if is_local(store) else store.head(name).etag
    entry = describe_shard(name, index, num_bytes=writer.num_bytes, crc32c=crc32c, etag=etag)
    part = ShardPart(number=task.number, entry=entry, bad=tuple(bad))
    _put(store, part_name(task.number), part.to_json().encode())
    return part


@cache
def _open_reader(confine: bool, options: StoreOptions | None) -> MediaReader:
    """Return this process's reader: its connections outlive a shard."""
    return MediaReader(confine=confine, options=options)


def _add_record(
    writer: ShardWriter,
    source: RecordSource,
    number: int,
    reader: MediaReader,
    counter: SampleCounter,
    bad: list[BadSample],
) -> None:
    """Append one record to the shard, or note why not."""
    try:
        record = source.read(number)
    except Exception as error:  # a record can hold anything in any place
        name, origin = _locate(source, number)
        bad.append(_bad_sample(name, origin, error))
        return
    name, own_id = record.source, record.id
    try:
        sample = build_sample(record, reader)
        counts = counter.count(sample.conversation, sample.sizes, record.extras.get("_text_tokens"))
        check_fits_index(counts.text_tokens, sample.sizes)
    except Exception as error:
        bad.append(_bad_sample(name, own_id, error))
        return
    for note in record.extras.get("_mismatches", ()):
        reason, _, detail = str(note).partition(": ")
        bad.append(BadSample(source=name, sample=own_id, stage="kept", reason=reason, detail=detail))
    writer.add(sample_key(number), sample, counts)


def _bad_sample(source: str, sample: str, error: Exception) -> BadSample:
    blamed = blame_sample(error, "convert", "bad_record", "the record cannot be made a sample")
    return BadSample(source=source, sample=sample, stage=blamed.stage, reason=blamed.reason, detail=str(blamed))


def _locate(source: Any, number: int) -> tuple[str, str]:
    """Return entry and `file:line` of a record that cannot be read, as far as its source knows them."""
    key = sample_key(number)
    while members := getattr(source, "members", ()):
        for member in members:
            if number < len(member):
                source = member
                break
            number -= len(member)
    return source.name, source.origin(number) if hasattr(source, "origin") else key


def is_local(store: Store) -> bool:
    """Tell whether the store is a folder of this machine."""
    return scheme_of(store.root) == "file"


def _put(store: Store, name: str, data: bytes) -> None:
    """Let bytes appear under a name, whole.

    A folder's own `put` waits for the disk, twice; shards wait for it once, together, before the manifest is written.
    """
    if not is_local(store):
        store.put(name, data)
        return
    with _staged(store, name) as file:
        write_all(file.fileno(), [data])


@contextlib.contextmanager
def _staged(store: Store, name: str) -> Iterator[IO[bytes]]:
    """Give an unfinished file: beside its target where a rename can finish it, else in the temp folder.

    It appears under its name, whole, when the block ends well.
    """
    folder = None
    if is_local(store):
        folder = Path(store.root, JOB_FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
    # Not opened a second time by its path: ext4 writes what was cut to nothing and filled again out at its close.
    descriptor, temporary = tempfile.mkstemp(prefix=f"{posixpath.basename(name)}.", suffix=".tmp", dir=folder)
    path = Path(temporary)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            yield file
        if folder is None:
            store.put(name, path)
        else:
            path.chmod(0o666 & ~_umask())
            path.replace(Path(store.root, name))
    except OSError as error:
        raise StorageError(
            f"{name} could not be written ({error.strerror or error}); what is finished is kept. "
            f"Free some space in {folder or tempfile.gettempdir()}, and go on with --resume."
        ) from error
    finally:
        path.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask


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
        for name in (tar, index_name(tar)):
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
            f"Check the disk and its free space, and go on with --resume."
        ) from error
