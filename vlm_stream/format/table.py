"""The table of an index: its schema, its Parquet bytes, and Arrow columns as numpy arrays.

Enters: Parquet bytes. Leaves: an Arrow table of the schema, or numpy views of its columns. A row per sample, in tar
order.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    import pyarrow as pa

    Numbers = npt.NDArray[Any]

__all__ = [
    "index_schema",
    "list_numbers",
    "numbers_of",
    "one_array",
    "read_table",
    "text_bytes",
    "write_table",
    "wrong_index",
]

_DICTIONARIES: Final = ("entry", "members.list.element.name")
"""Columns of a Parquet file whose texts are few and come often: in memory they are numbers of a dictionary."""


@cache
def index_schema(names: tuple[str, ...] | None = None) -> pa.Schema:
    """Return the schema, or that of some columns (made on first use: pyarrow is not imported before it is needed)."""
    import pyarrow as pa

    if names is not None:
        return pa.schema([index_schema().field(name) for name in names])
    image = pa.struct([("height", pa.int32()), ("width", pa.int32())])
    video = pa.struct(
        [
            ("frames", pa.int32()),
            ("height", pa.int32()),
            ("width", pa.int32()),
            ("fps", pa.float64()),
            ("seconds", pa.float64()),
            ("picked", pa.int32()),  # frames that the sample names itself; 0: the training rule samples
        ]
    )
    audio = pa.struct([("samples", pa.int64()), ("rate", pa.int32())])
    name = pa.dictionary(pa.int32(), pa.string())
    member = pa.struct([("name", name), ("offset", pa.int64()), ("size", pa.int64())])
    return pa.schema(
        [
            ("key", pa.string()),
            ("id", pa.string()),  # the record's own; null: it has none
            ("entry", name),  # of the meta file, or the file that the record came from
            ("offset", pa.int64()),  # the sample's first tar header
            ("size", pa.int64()),  # up to and with the padding of its last member
            ("crc32c", pa.uint32()),  # of that range
            ("text_tokens", pa.int32()),  # one for every media placeholder
            ("label_tokens", pa.int32()),  # those that are learned; -1: not counted
            ("images", pa.list_(image)),
            ("videos", pa.list_(video)),
            ("audios", pa.list_(audio)),
            ("members", pa.list_(member)),  # offsets of contents, counted from the start of the shard
        ]
    )


def write_table(table: pa.Table) -> bytes:
    """Return the Parquet bytes of a table of this schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=max(table.num_rows, 1),
        compression="zstd",
        use_dictionary=list(_DICTIONARIES),
        write_statistics=False,
        store_schema=False,
    )
    return bytes(sink.getvalue())


def read_table(data: bytes, where: str, names: tuple[str, ...] | None = None) -> pa.Table:
    """Return the named columns of an index, by default all of them.

    Raises:
        DatasetError: The bytes are no index, or a column is missing or of another kind.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = index_schema(names)
    with wrong_index(where):
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=list(_DICTIONARIES))
        # One thread each: indexes are small, and many are decoded side by side. Group by group: Arrow cannot join
        # nested dictionaries while it reads.
        groups = range(file.num_row_groups)
        parts = [file.read_row_group(group, columns=schema.names, use_threads=False) for group in groups]
        table = pa.concat_tables(parts) if parts else file.read(columns=schema.names, use_threads=False)
        return table if table.schema.equals(schema) else table.select(schema.names).cast(schema)


@contextmanager
def wrong_index(where: str) -> Iterator[None]:
    """Say which index it is that Arrow cannot make sense of."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise DatasetError(
            f"{where} is not an index of this format ({error}): it was damaged or made by something else. "
            f"Write it again with: vlm-stream index"
        ) from error


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return the values of a column as one array."""
    import pyarrow as pa

    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=column.type)


def numbers_of(array: pa.Array) -> Numbers:
    """Return an array's numbers, read-only and without a copy; raise `ArrowInvalid` where one is missing.

    Not by `to_numpy`, which imports pandas where it is installed.
    """
    import pyarrow as pa

    dtype = np.dtype(array.type.to_pandas_dtype())  # a numpy type, whatever its name says
    if array.null_count:
        raise pa.ArrowInvalid(f"{array.null_count} numbers are missing")
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def list_numbers(array: pa.ListArray, names: tuple[str, ...]) -> tuple[Numbers, dict[str, Numbers]]:
    """Return [n + 1] where each row's entries begin, and the entries field by field."""
    return numbers_of(array.offsets), {name: numbers_of(array.values.field(name)) for name in names}


def text_bytes(array: pa.StringArray) -> tuple[Numbers, bytes]:
    """Return [n + 1] where each text begins, and the UTF-8 bytes of all."""
    import pyarrow as pa

    if array.null_count:
        raise pa.ArrowInvalid(f"{array.null_count} texts are missing")
    if not len(array):
        return np.zeros(1, np.int32), b""
    _, splits, data = array.buffers()
    begins = np.frombuffer(splits, np.int32, len(array) + 1, array.offset * 4)
    return begins, bytes(memoryview(data or b"")[: begins[-1]])
