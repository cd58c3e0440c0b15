"""A shard's two files: samples laid into a tar, and the rows of its index.

Enters: samples with their keys, in order, or what the reader of a tar learned of them. Leaves: the bytes of a tar,
written front to back; a row for each sample, with the place and the checksum of its bytes; and the Parquet bytes of all
rows. The same samples give the same bytes. Records, stores and other shards are not known here.

The tar as a whole gets a crc32c too: a sha256 of it would cost as much as reading and writing together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import crc32c

from vlm_stream.convert.tar import END_OF_TAR, member_header, padding
from vlm_stream.errors import BadSampleError
from vlm_stream.format import index_schema, read_table, write_table
from vlm_stream.storage import Member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.convert.sample import Sample
    from vlm_stream.tokens import MediaSizes

__all__ = [
    "SampleCounts",
    "SampleRow",
    "ShardWriter",
    "check_fits_index",
    "encode_index",
    "recounted_index",
    "write_all",
]

_LARGEST: Final = 2**31 - 1
"""Counts and sizes have 32 bits in an index; places in a shard have 64."""
_BATCH_BYTES: Final = 1 << 20
"""Small samples are written together."""
_MAX_VECTORS: Final = 512
"""Pieces in one call; systems allow 1,024."""


class SampleCounts(NamedTuple):
    """What a sample's text costs; named as the columns of an index are."""

    text_tokens: int
    """All of it, one for every media placeholder."""
    label_tokens: int = -1
    """Those that are learned: they have a label, and a token before them. -1: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One sample in its shard."""

    key: str
    id: str | None = None
    """The record's own; None: it has none."""
    entry: str = ""
    """Name of the meta file's entry, or of the file, that it came from."""
    offset: int
    size: int
    crc32c: int
    text_tokens: int
    label_tokens: int
    sizes: MediaSizes
    members: tuple[Member, ...]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values in the order of the schema's columns and of their structs' fields."""
        sizes = self.sizes
        return (
            self.key,
            self.id or None,
            self.entry,
            self.offset,
            self.size,
            self.crc32c,
            self.text_tokens,
            self.label_tokens,
            [(image.height, image.width) for image in sizes.images],
            [(v.frames, v.height, v.width, v.fps, v.seconds, len(v.picked)) for v in sizes.videos],
            [(audio.samples, audio.rate) for audio in sizes.audios],
            self.members,
        )


def encode_index(rows: Sequence[SampleRow]) -> bytes:
    """Return the Parquet bytes of rows."""
    import pyarrow as pa

    schema = index_schema()
    columns = zip(*(row.to_tuple() for row in rows), strict=True) if rows else [[] for _ in schema.names]
    arrays = [pa.array(values, type=column.type) for values, column in zip(columns, schema, strict=True)]
    return write_table(pa.table(arrays, schema=schema))


def recounted_index(data: bytes, counts: Sequence[SampleCounts]) -> bytes:
    """Return an index with other counts and all else as it was."""
    import pyarrow as pa

    table = read_table(data, "index")
    for name in SampleCounts._fields:
        values = pa.array([getattr(sample, name) for sample in counts], type=pa.int32())
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return write_table(table)


def check_fits_index(text_tokens: int, sizes: MediaSizes) -> None:
    """Raise `BadSampleError` for a sample with a number that an index cannot hold: it would end the whole shard."""
    sides = [side for image in sizes.images for side in (image.height, image.width)]
    sides += [side for video in sizes.videos for side in (video.height, video.width)]
    numbers = {
        "text tokens": [text_tokens],
        "pixels a side": sides,
        "frames": [number for video in sizes.videos for number in (video.frames, len(video.picked))],
        "Hz": [audio.rate for audio in sizes.audios],
    }
    for what, values in numbers.items():
        wrong = next((value for value in values if not 0 <= value <= _LARGEST), None)
        if wrong is not None:
            detail = f"the sample claims {wrong} {what}, which no index holds: it goes from 0 to {_LARGEST}."
            raise BadSampleError("convert", "number_too_large", detail)


class ShardWriter:
    """Lays samples into a tar, one after the other."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to an open file without a buffer of its own, from its beginning."""
        self._file = file
        self._crc = 0
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self.num_bytes = 0
        self.rows: list[SampleRow] = []

    def add(self, key: str, sample: Sample, counts: SampleCounts) -> None:
        """Append one sample with all of its members."""
        begin = position = self.num_bytes
        crc = 0
        places = []
        for name, content in sample.members:
            header = member_header(f"{key}.{name}", len(content))
            places.append(Member(name, position + len(header), len(content)))
            for piece in (header, content, bytes(padding(len(content)))):
                crc = crc32c.crc32c(piece, crc)
                position += len(piece)
                self._batch.append(piece)
        self._batch_bytes += position - begin
        if self._batch_bytes >= _BATCH_BYTES:
            self._write_batch()
        self.num_bytes = position
        self.rows.append(
            SampleRow(
                key=key,
                id=sample.id,
                entry=sample.entry,
                offset=begin,
                size=position - begin,
                crc32c=crc,
                text_tokens=counts.text_tokens,
                label_tokens=counts.label_tokens,
                sizes=sample.sizes,
                members=tuple(places),
            )
        )

    def finish(self) -> int:
        """Write the end of the tar; return the crc32c of the whole."""
        self._batch.append(END_OF_TAR)
        self._write_batch()
        self.num_bytes += len(END_OF_TAR)
        return self._crc

    def _write_batch(self) -> None:
        pieces, self._batch, self._batch_bytes = self._batch, [], 0
        for piece in pieces:
            self._crc = crc32c.crc32c(piece, self._crc)
        write_all(self._file.fileno(), pieces)


def write_all(descriptor: int, pieces: list[bytes]) -> None:
    """Write many pieces with few calls and no copies."""
    for first in range(0, len(pieces), _MAX_VECTORS):
        some = pieces[first : first + _MAX_VECTORS]
        written = os.writev(descriptor, some) if hasattr(os, "writev") else 0
        if written < sum(map(len, some)):  # interrupted, or more than one call takes, or Windows
            rest = memoryview(b"".join(some))[written:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
