"""The table of an index as numpy columns: what plans need, and where samples lie.

The two are read apart, and only media that the shard has: a run opens hundreds of indexes before its first batch, plans
with all of them and fetches from few.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import DatasetError
from vlm_stream.ragged import take_rows
from vlm_stream.shards.columns import to_array, to_numbers
from vlm_stream.shards.schema import index_schema
from vlm_stream.tokens import MediaColumns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa

__all__ = [
    "MEDIA",
    "MEMBER_NAME",
    "PLACE_NAMES",
    "PlanColumns",
    "SamplePlaces",
    "column_numbers",
    "plan_names",
    "read_table",
    "telling",
]

MEDIA: Final = ("images", "videos", "audios")
PLACE_NAMES: Final = ("key", "crc32c", "members")
MEMBER_NAME: Final = "members.list.element.name"
"""The path of that column in a Parquet file."""


class SamplePlaces:
    """What the samples of one or many shards are called, where their members lie, and what their bytes add up to.

    Views of numbers: a run keeps those of a thousand shards, and as lists of Python's numbers they take five times the
    memory. Not numpy's arrays, of which single numbers come out half as fast.
    """

    __slots__ = ("_key_bytes", "_key_splits", "_members", "_names", "_splits", "crc32c")

    def __init__(self, table: pa.Table, where: str) -> None:
        """Look at an index, or at its columns `PLACE_NAMES`."""
        members = _plain(table.column("members"))
        names = members.values.field("name")
        with telling(where):
            key_splits, self._key_bytes = _texts(_plain(table.column("key")))
            splits, places = _ragged(members, ("offset", "size"))
            self._members = (to_numbers(names.indices).data, places["offset"].data, places["size"].data)
            self.crc32c = column_numbers(table, "crc32c").data
            """[n] Checksums of the samples' ranges."""
        self._key_splits, self._splits = key_splits.data, splits.data
        self._names = list(map(sys.intern, names.dictionary.to_pylist()))

    def key(self, row: int) -> str:
        """Return what a sample is called."""
        return str(self._key_bytes[self._key_splits[row] : self._key_splits[row + 1]], "utf-8")

    def members(self, row: int) -> tuple[tuple[str, int, int], ...]:
        """Return a sample's files, in tar order: name without the key, first content byte in the shard, size."""
        names, (name, offset, size) = self._names, self._members
        places = range(self._splits[row], self._splits[row + 1])
        return tuple([(names[name[place]], offset[place], size[place]) for place in places])

    def keys_of(self, rows: npt.NDArray[np.int64]) -> list[str]:
        """Return what samples are called, sooner than one by one."""
        splits, data = np.asarray(self._key_splits), self._key_bytes
        ranges = zip(splits[rows].tolist(), splits[rows + 1].tolist(), strict=True)
        return [str(data[begin:end], "utf-8") for begin, end in ranges]

    def members_of(self, rows: npt.NDArray[np.int64]) -> list[tuple[tuple[str, int, int], ...]]:
        """Return the files of samples, sooner than one by one."""
        places, splits = take_rows(np.asarray(self._splits), rows)
        name, offset, size = (np.asarray(column)[places].tolist() for column in self._members)
        members = tuple(zip(map(self._names.__getitem__, name), offset, size, strict=True))
        return [members[begin:end] for begin, end in itertools.pairwise(splits.tolist())]


def read_table(data: bytes, where: str, names: tuple[str, ...] | None = None) -> pa.Table:
    """Return the named columns of an index, by default all of them.

    Raises:
        DatasetError: The bytes are no index, or a column is missing or of another kind.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = index_schema(names)
    with telling(where):
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=[MEMBER_NAME])
        # One thread: an index is small, and hundreds are read side by side already. Group by group: Arrow cannot join
        # nested dictionaries while it reads.
        groups = range(file.num_row_groups)
        parts = [file.read_row_group(group, columns=schema.names, use_threads=False) for group in groups]
        table = pa.concat_tables(parts) if parts else file.read(columns=schema.names, use_threads=False)
        return table if table.schema.equals(schema) else table.select(schema.names).cast(schema)


@contextmanager
def telling(where: str) -> Iterator[None]:
    """Say which index it is that Arrow cannot make sense of."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise DatasetError(
            f"{where} is not an index of this format ({error}): it was damaged or made by something else. "
            f"Write it again with: vlm-stream index"
        ) from error


def plan_names(media: Collection[str]) -> tuple[str, ...]:
    """Return the columns that `PlanColumns` looks at, in the order of the schema."""
    return ("offset", "size", "text_tokens", "label_tokens", *(kind for kind in MEDIA if kind in media))


class PlanColumns:
    """What plans need of the samples of some shards: as it lies in the table, and copied for those that are taken."""

    def __init__(self, table: pa.Table, where: str, media: Collection[str] = MEDIA) -> None:
        """Look at an index, or at its columns `plan_names(media)`.

        Args:
            table: The index.
            where: What messages call it.
            media: Kinds of media that the shards have; the columns of others are not looked at.
        """

        def ragged(kind: str, fields: Sequence[str]) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
            if kind in media:
                return _ragged(_plain(table.column(kind)), fields)
            return np.zeros(table.num_rows + 1, dtype=np.int64), dict.fromkeys(fields, np.zeros(0, dtype=np.int64))

        with telling(where):
            self._images = ragged("images", ("height", "width"))
            self._videos = ragged("videos", ("frames", "height", "width", "fps", "seconds", "picked"))
            self._audios = ragged("audios", ("samples", "rate"))
            self.offset, self.size, self._tokens, self._labels = (
                column_numbers(table, name) for name in ("offset", "size", "text_tokens", "label_tokens")
            )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offset)

    def take(self, rows: npt.NDArray[np.int64] | slice) -> MediaColumns:
        """Return text counts and media sizes of some samples, in the order of `rows`."""
        image_splits, images = _take(self._images, rows)
        video_splits, videos = _take(self._videos, rows)
        audio_splits, audios = _take(self._audios, rows)
        return MediaColumns(
            text_tokens=self._tokens[rows].astype(np.int64),
            label_tokens=self._labels[rows].astype(np.int64),
            image_splits=image_splits,
            image_sizes=_stack(images, ("height", "width")),
            video_splits=video_splits,
            video_sizes=_stack(videos, ("frames", "height", "width")),
            video_fps=videos["fps"].astype(np.float64),
            video_seconds=videos["seconds"].astype(np.float64),
            video_picked=videos["picked"].astype(np.int64),
            audio_splits=audio_splits,
            audio_sizes=_stack(audios, ("samples", "rate")),
        )


def _take(
    ragged: tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]], rows: npt.NDArray[np.int64] | slice
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]:
    splits, columns = ragged
    entries: npt.NDArray[np.int64] | slice
    if isinstance(rows, slice):
        taken = splits[rows.start : rows.stop + 1].astype(np.int64)
        entries = slice(taken[0], taken[-1])
        taken -= taken[0]
    elif splits[-1]:
        entries, taken = take_rows(splits, rows)
    else:  # most data lacks at least one kind of media
        return np.zeros(len(rows) + 1, dtype=np.int64), columns
    return taken, {name: column[entries] for name, column in columns.items()}


def column_numbers(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """Return a column of numbers, where it lies."""
    return to_numbers(_plain(table.column(name)))


def _plain(column: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else to_array([], column.type)


def _ragged(array: pa.ListArray, names: Sequence[str]) -> tuple[npt.NDArray[np.int32], dict[str, npt.NDArray[Any]]]:
    """Return [n + 1] where each row's entries begin, and the entries field by field."""
    entries = array.values
    return to_numbers(array.offsets), {name: to_numbers(entries.field(name)) for name in names}


def _texts(array: pa.StringArray) -> tuple[npt.NDArray[np.int32], memoryview]:
    """Return [n + 1] where each text begins, and all of them: a text of Arrow's own takes twice as long to look at."""
    import pyarrow as pa

    if array.null_count:
        raise pa.ArrowInvalid(f"{array.null_count} texts are missing")
    _, splits, data = array.buffers()
    if not len(array):
        return np.zeros(1, dtype=np.int32), memoryview(b"")
    return np.frombuffer(splits, np.int32, len(array) + 1, array.offset * 4), memoryview(data or b"")


def _stack(fields: dict[str, npt.NDArray[Any]], names: Sequence[str]) -> npt.NDArray[np.int64]:
    return np.stack([fields[name].astype(np.int64) for name in names], axis=1)
