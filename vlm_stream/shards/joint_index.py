"""All indexes of a small dataset in one object, so that a run with many shards need not ask for them one by one.

Enters: a store and a manifest. Leaves: `dataset.indexes.arrow` beside the manifest, which states its checksum; or the
columns of all shards, and the `ShardIndex` of any. It is a copy: where it is missing or not the one that the manifest
describes, the indexes of the shards say the same, only later. An Arrow stream without compression: four times as large
as Parquet, but its columns are looked at where they lie.

It also keeps what the samples cost by the geometry that the dataset was counted for, and says by which rules: a run
with that geometry need not count. Others do, as they would with the indexes of the shards.

Large datasets have none. A run shuffles over a few thousand samples at a time; where these lie in a handful of shards,
a handful of indexes is soon read, and all indexes of the dataset would not be.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import crc32c
import numpy as np

from vlm_stream.errors import DatasetError, NotFoundError, StorageError
from vlm_stream.shards.columns import to_array
from vlm_stream.shards.index import ShardIndex, check_index, fetch_index
from vlm_stream.shards.index_columns import MEDIA, PlanColumns, SamplePlaces, column_numbers, read_table, telling
from vlm_stream.shards.layout import JOINT_INDEX
from vlm_stream.shards.schema import COUNTED_AS, COUNTS, index_schema, joint_schema
from vlm_stream.storage.values import Span
from vlm_stream.tokens import TokenColumns, count_tokens, counted_as

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    import pyarrow as pa

    from vlm_stream.shards.manifest import Manifest
    from vlm_stream.shards.shard_list import ShardList
    from vlm_stream.storage import Store
    from vlm_stream.tokens import MediaColumns

    Ints = npt.NDArray[np.int64]

__all__ = ["JointIndex", "check_joint_index", "read_joint_index", "with_joint_index"]

_MIN_SHARDS: Final = 2
_MAX_SAMPLES: Final = 131_072
_THREADS: Final = 32
_MAX_NARROW: Final = 1 << 31
"""Smaller shards have places of 32 bits."""


class JointIndex:
    """The indexes of all shards of a dataset."""

    def __init__(self, table: pa.Table, store: Store, manifest: Manifest) -> None:
        """Decode what plans need; where samples lie is decoded when it is asked for.

        Raises:
            DatasetError: The table is no index of that many samples.
        """
        self._table = table
        self._where = f"{store.root}/{JOINT_INDEX}"
        self._root = manifest.tars or store.root
        self._shards = manifest.shards
        sizes = manifest.shards.column("samples")
        self.splits: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        """[shards + 1] Shard s owns the rows `splits[s]:splits[s + 1]` of the columns."""
        if table.num_rows != self.splits[-1]:
            raise DatasetError(f"{self._where} has {table.num_rows} samples, the manifest says {self.splits[-1]}.")
        with telling(self._where):
            self.offset, self.size = (column_numbers(table, name) for name in ("offset", "size"))
        self.counted_as = _counted_as(table)
        """Of `counts`; empty where there are none."""

    def counts(self, rows: Ints | slice) -> TokenColumns:
        """Return what some samples cost, as it was counted when the index was written."""
        with telling(self._where):
            return TokenColumns(**{name: column_numbers(self._table, name)[rows] for name in COUNTS})

    def label_tokens(self, rows: Ints | slice) -> Ints:
        """Return how many labels some samples have; -1: unknown."""
        with telling(self._where):
            return column_numbers(self._table, "label_tokens")[rows].astype(np.int64)

    def media(self, rows: Ints | slice) -> MediaColumns:
        """Return text counts and media sizes of some samples."""
        return self._columns.take(rows)

    def shard(self, number: int) -> ShardIndex:
        """Return the index of one shard."""
        shards = self._shards
        begin, end = self.splits[number : number + 2].tolist()
        return ShardIndex(
            load_media=lambda: self.media(slice(begin, end)),
            offset=self.offset[begin:end],
            size=self.size[begin:end],
            load_places=lambda: self._places,
            first=begin,
            root=self._root,
            path=shards.column("name")[number],
            shard_size=shards.column("bytes")[number],
            etag=shards.column("etag")[number],
        )

    def spans(self, shards: Ints, rows: Ints) -> list[Span]:
        """Return where samples lie, sooner than one by one."""
        at = self.splits[shards] + rows
        offset, size = self.offset[at].tolist(), self.size[at].tolist()
        crc, members = np.asarray(self._places.crc32c)[at].tolist(), self._places.members_of(at)
        path, num_bytes, etag = (self._of_shards(name, shards) for name in ("name", "bytes", "etag"))
        fields = zip(repeat(self._root), path, offset, size, crc, members, num_bytes, etag, strict=False)
        return [Span(*row) for row in fields]

    def names(self, shards: Ints, rows: Ints) -> list[tuple[str, str]]:
        """Return shard and key of samples."""
        return list(zip(self._of_shards("name", shards), self._places.keys_of(self.splits[shards] + rows), strict=True))

    def _of_shards(self, column: str, shards: Ints) -> Iterator[Any]:
        return map(self._shards.column(column).__getitem__, shards.tolist())

    @cached_property
    def _columns(self) -> PlanColumns:
        return PlanColumns(self._table, self._where, _kinds(self._shards))

    @cached_property
    def _places(self) -> SamplePlaces:
        return SamplePlaces(self._table, self._where)


def _kinds(shards: ShardList) -> list[str]:
    """Return the kinds of media that shards have."""
    return [kind for kind in MEDIA if any(shards.column(kind))]


def with_joint_index(store: Store, manifest: Manifest) -> Manifest:
    """Write the joint index of a dataset whose indexes are written, if it is to have one; return what to save."""
    if len(manifest.shards) < _MIN_SHARDS or manifest.totals.samples > _MAX_SAMPLES:
        return replace(manifest, joint_index_crc32c=None)
    table = _with_counts(_join(store, manifest), manifest)
    data = _write(table, narrow=max(manifest.shards.column("bytes")) < _MAX_NARROW)
    store.put(JOINT_INDEX, data)
    return replace(manifest, joint_index_crc32c=crc32c.crc32c(data))


def _join(store: Store, manifest: Manifest) -> pa.Table:
    """Return the rows of all indexes in the order of their shards.

    Raises:
        DatasetError: One of them is not the one that the manifest describes: what is joined would be trusted.
    """
    import pyarrow as pa

    with ThreadPoolExecutor(_THREADS) as pool:
        indexes = pool.map(lambda shard: fetch_index(store, shard), manifest.shards)
        tables = []
        for shard, data in zip(manifest.shards, indexes, strict=True):
            check_index(data, store, shard)
            tables.append(read_table(data, "index"))
        return pa.concat_tables(tables).combine_chunks()


def _counted_as(table: pa.Table) -> str:
    note: bytes = (table.schema.metadata or {}).get(COUNTED_AS, b"")
    return note.decode()


def _with_counts(table: pa.Table, manifest: Manifest) -> pa.Table:
    """Add what the samples cost, by the geometry that the dataset was counted for."""
    geometry = manifest.geometry
    columns = PlanColumns(table, JOINT_INDEX, _kinds(manifest.shards))
    counts = count_tokens(columns.take(slice(0, table.num_rows)), geometry)
    for name in COUNTS:
        field = joint_schema(narrow=False).field(name)
        table = table.append_column(field, to_array(getattr(counts, name).tolist(), field.type))
    return table.replace_schema_metadata({COUNTED_AS: counted_as(geometry.digest()).encode()})


def _write(table: pa.Table, *, narrow: bool) -> bytes:
    import pyarrow as pa

    sink, schema = pa.BufferOutputStream(), joint_schema(narrow=narrow).with_metadata(table.schema.metadata)
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table.cast(schema))
    return bytes(sink.getvalue())


def read_joint_index(store: Store, manifest: Manifest) -> JointIndex:
    """Read the joint index of a dataset whose manifest states one.

    Raises:
        DatasetError: It is missing, damaged, or not the one that the manifest describes.
    """
    return JointIndex(_read(store, manifest), store, manifest)


def check_joint_index(store: Store, manifest: Manifest) -> None:
    """Compare the joint index of a dataset whose manifest states one with the indexes of its shards.

    Raises:
        DatasetError: It is not there, or says something else, or one of the others cannot be read.
    """
    table, joined = _read(store, manifest), _join(store, manifest)
    if _counted_as(table) == counted_as(manifest.geometry.digest()):  # else nobody looks at the counts
        joined = _with_counts(joined, manifest)
    if not table.select(joined.column_names).cast(joined.schema).equals(joined):
        raise DatasetError(f"{store.root}/{JOINT_INDEX} does not hold what the indexes of the shards do.")


def _read(store: Store, manifest: Manifest) -> pa.Table:
    import pyarrow as pa

    where = f"{store.root}/{JOINT_INDEX}"
    data = _fetch(store, manifest)
    with telling(where):
        # One thread: a run may fork behind it.
        options = pa.ipc.IpcReadOptions(use_threads=False)
        table = pa.ipc.open_stream(pa.BufferReader(data), options=options).read_all()
    known = (schema(narrow=narrow) for schema in (joint_schema, index_schema) for narrow in (True, False))
    if not any(map(table.schema.equals, known)):
        raise DatasetError(f"{where} has other columns than an index of this format.")
    return table


def _fetch(store: Store, manifest: Manifest) -> bytes:
    where = f"{store.root}/{JOINT_INDEX}"
    try:
        data = bytes(store.get(JOINT_INDEX))
    except NotFoundError as error:
        raise DatasetError(f"{where} is missing.") from error
    except StorageError as error:  # some stores say 403 of what is not there
        raise DatasetError(f"{where} could not be read: {error}") from error
    if crc32c.crc32c(data) != manifest.joint_index_crc32c:
        raise DatasetError(f"{where} is not the one that the manifest describes.")
    return data
