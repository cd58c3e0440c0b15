"""The columns of an index file: a row per sample, in tar order."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COUNTED_AS", "COUNTS", "index_schema", "joint_schema"]

COUNTS: Final = ("tokens", "vision_tokens", "vision_patches", "vision_squares")
"""Columns of a joint index that the indexes of shards do not have."""
COUNTED_AS: Final = b"counted_as"
"""Where a joint index says how they came about."""


@cache
def index_schema(names: tuple[str, ...] | None = None, *, narrow: bool = False) -> pa.Schema:
    """Return the schema (made on first use: pyarrow is not imported before it is needed).

    Names of members are few and come often: in memory they are numbers of a dictionary.

    Args:
        names: Only these columns.
        narrow: With places of 32 bits, enough for shards below 2 GB.
    """
    import pyarrow as pa

    place = pa.int32() if narrow else pa.int64()
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
    member = pa.struct([("name", pa.dictionary(pa.int32(), pa.string())), ("offset", place), ("size", place)])
    return pa.schema(
        [
            ("key", pa.string()),
            ("offset", place),  # the sample's first tar header
            ("size", place),  # up to and with the padding of its last member
            ("crc32c", pa.uint32()),  # of that range
            ("text_tokens", pa.int32()),  # one for every media placeholder
            ("label_tokens", pa.int32()),  # those that are learned; -1: not counted
            ("images", pa.list_(image)),
            ("videos", pa.list_(video)),
            ("audios", pa.list_(audio)),
            ("members", pa.list_(member)),  # offsets of contents, counted from the start of the shard
        ]
    )


@cache
def joint_schema(*, narrow: bool) -> pa.Schema:
    """Return the schema of a joint index: with what the samples cost, by the geometry that the dataset was counted for.

    For a hundred thousand samples that takes some tens of milliseconds to count, and less than one to read.
    """
    import pyarrow as pa

    schema = index_schema(narrow=narrow)
    for name in COUNTS:
        schema = schema.append(pa.field(name, pa.float64() if name == "vision_squares" else pa.int64()))
    return schema
