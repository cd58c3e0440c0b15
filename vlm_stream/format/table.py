"""The table of an index: its schema, its Parquet bytes, and Arrow columns as numpy arrays.

Enters: Parquet bytes. Leaves: an Arrow table of the schema, or numpy views of its columns. A row per sample, in tar
order.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import DatasetError, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    Numbers = npt.NDArray[Any]

CLIP_COLUMNS: Final = ("clips", "gops")
"""Columns that an index has only where samples of its shard have tables of clips, which lie in a file beside it."""
KEYFRAMES: Final = "keyframes"
"""A column that an index has only where samples of its shard have videos; older ones lack it."""
TEXT_COLUMN: Final = "texts"
"""Likewise, where the tokens of texts lie in a file beside it."""
_OPTIONAL: Final = (*CLIP_COLUMNS, KEYFRAMES, TEXT_COLUMN)
_DICTIONARIES: Final = ("entry", "members.list.element.name")
"""Columns of a Parquet file whose texts are few and come often: in memory they are numbers of a dictionary."""

_TEXTS: Final = ("key", "id")
"""Columns whose texts differ from row to row. Other writers may store them by a dictionary all the same."""
_FREE_BYTES: Final = 64 << 20
_MAX_RATIO: Final = 64
"""An index may take so many bytes in memory, and so many for each of its own."""
_VALUE_BYTES: Final = 8


@cache
def index_schema(names: tuple[str, ...] | None = None) -> pa.Schema:
    """Return the schema, or that of some columns (made on first use: pyarrow is not imported before it is needed)."""
    import pyarrow as pa

    if names is not None:
        return pa.schema([_all_columns().field(name) for name in names])
    return pa.schema([field for field in _all_columns() if field.name not in _OPTIONAL])


@cache
def _all_columns() -> pa.Schema:
    import pyarrow as pa

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
    place = pa.struct([("offset", pa.int64()), ("size", pa.int64()), ("crc32c", pa.uint32())])
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
            ("clips", place),  # size 0: none
            ("gops", pa.list_(pa.int32())),  # groups of pictures of each video; 0: not known
            (KEYFRAMES, pa.list_(pa.list_(pa.int32()))),  # of each video: the first, then pairs of a step and times
            (TEXT_COLUMN, place),  # size 0: none
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


def read_table(
    data: bytes, where: str, names: tuple[str, ...] | None = None, *, num_rows: int | None = None
) -> pa.Table:
    """Return the named columns of an index, by default all of them; optional ones only where it has them.

    Args:
        data: The bytes.
        where: What messages call them.
        names: Columns.
        num_rows: How many samples the manifest says; None: any number.

    Raises:
        DatasetError: The bytes are no index, or a column is missing or of another kind; they have other rows than
            expected, or would take more memory than their size makes plausible. Nothing is decoded then.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with wrong_index(where):
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=list(_DICTIONARIES))
        if num_rows is not None and file.metadata.num_rows != num_rows:
            raise DatasetError(f"{where} has {file.metadata.num_rows} samples, the manifest says {num_rows}.")
        if _check_decoded(file.metadata, len(data)):
            names_and_texts = [*_DICTIONARIES, *_TEXTS]
            file = pq.ParquetFile(pa.BufferReader(data), metadata=file.metadata, read_dictionary=names_and_texts)
        here = set(file.schema_arrow.names)
        missing = {name for name in _OPTIONAL if not (set(CLIP_COLUMNS) if name in CLIP_COLUMNS else {name}) <= here}
        asked = index_schema().names + list(_OPTIONAL) if names is None else list(names)
        schema = index_schema(tuple(name for name in asked if name not in missing))
        # One thread each: indexes are small, and many are decoded side by side. Group by group: Arrow cannot join
        # nested dictionaries while it reads.
        groups = range(file.num_row_groups)
        parts = [file.read_row_group(group, columns=schema.names, use_threads=False) for group in groups]
        for part in parts:
            _check_texts(part, len(data))
        table = pa.concat_tables(parts) if parts else file.read(columns=schema.names, use_threads=False)
        table = table if table.schema.equals(schema) else table.select(schema.names).cast(schema)
        table.validate(full=True)  # texts are UTF-8, numbers of dictionaries are in them
        return table


def read_groups(data: bytes, names: Sequence[str], *, texts: Sequence[str] = ()) -> Iterator[pa.Table]:
    """Yield some columns of any Parquet file, a row group at a time; memory is bounded by its bytes.

    Args:
        data: The bytes.
        names: Columns.
        texts: Those of them that hold texts, or lists of texts.

    Raises:
        ValueError: They would take more memory than the size of the file makes plausible.
        ArrowException: The bytes are no Parquet, or have no such columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(pa.BufferReader(data))
    _check_decoded(metadata, len(data), names)
    leaves = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    repeated = [leaf for leaf in leaves if any(_is_of(leaf, name) for name in texts)]
    file = pq.ParquetFile(pa.BufferReader(data), metadata=metadata, read_dictionary=repeated)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=list(names), use_threads=False)
        _check_texts(table, len(data), texts)
        yield table


def _is_of(leaf: str, name: str) -> bool:
    return leaf == name or leaf.startswith(f"{name}.")


def _check_decoded(metadata: Any, num_bytes: int, names: Sequence[str] | None = None) -> bool:
    """Raise where the columns of a file would take far more memory than its bytes: by its own footer.

    Args:
        metadata: The footer.
        num_bytes: The file's.
        names: Columns that are read; None: all.

    Returns:
        Whether texts that differ from row to row are stored by a dictionary, which may repeat a long one.
    """
    decoded, has_dictionary = 0, False
    if metadata.num_row_groups > max(metadata.num_rows, 1):
        raise ValueError(f"{metadata.num_row_groups} row groups for {metadata.num_rows} samples")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            if names is not None and not any(_is_of(column.path_in_schema, name) for name in names):
                continue
            has_dictionary |= column.has_dictionary_page and column.path_in_schema in _TEXTS
            decoded += column.total_uncompressed_size + column.num_values * _VALUE_BYTES
    _check_room(decoded, num_bytes)
    return has_dictionary


def _check_texts(table: pa.Table, num_bytes: int, names: Sequence[str] = _TEXTS) -> None:
    """Raise where texts that are repeated by a dictionary would take far more memory than the index's bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in set(names) & set(table.column_names):
        for chunk in table.column(name).chunks:
            while pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
                chunk = chunk.flatten()
            if pa.types.is_dictionary(chunk.type) and len(chunk.dictionary):
                _check_room(len(chunk) * pc.max(pc.binary_length(chunk.dictionary)).as_py(), num_bytes)


def _check_room(decoded: int, num_bytes: int) -> None:
    if decoded > _FREE_BYTES + _MAX_RATIO * num_bytes:
        raise ValueError(f"its {num_bytes} bytes would take {decoded} in memory")


@contextmanager
def wrong_index(where: str) -> Iterator[None]:
    """Say which index it is that Arrow cannot make sense of."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, KeyError, TypeError, ValueError, IndexError, OSError) as error:
        raise DatasetError(
            f"{where} is not an index of this format ({shorten(str(error), 300)}): it was damaged or made by something "
            f"else. Write it again with: vlm-stream index"
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


def empty_where_null(array: pa.StringArray) -> pa.StringArray:
    """Return the texts, empty ones where they are missing.

    Not by `fill_null`, which imports pandas where it is installed, to see whether it was given one of its values.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    begins = pa.py_buffer(np.zeros(len(array) + 1, np.int32))
    return pc.coalesce(array, pa.StringArray.from_buffers(len(array), begins, pa.py_buffer(b"")))


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
