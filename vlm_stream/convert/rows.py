"""Rows of an index: what is known of each sample of a shard, and the Parquet bytes of all of them.

Enters: what the writer or the reader of a tar learned. Leaves: bytes; the same rows give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vlm_stream.errors import BadSampleError
from vlm_stream.format import index_schema, read_table, write_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.storage import Member
    from vlm_stream.tokens import MediaSizes

__all__ = ["SampleCounts", "SampleRow", "check_fits_index", "encode_index", "recounted_index"]

_LARGEST: Final = 2**31 - 1
"""Counts and sizes have 32 bits in an index; places in a shard have 64."""


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
