"""The columns of an index file: a row per sample, in tar order."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["index_schema"]


@cache
def index_schema(names: tuple[str, ...] | None = None) -> pa.Schema:
    """Return the schema, or that of some columns (made on first use: pyarrow is not imported before it is needed).

    Names of members are few and come often: in memory they are numbers of a dictionary.
    """
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
    member = pa.struct([("name", pa.dictionary(pa.int32(), pa.string())), ("offset", pa.int64()), ("size", pa.int64())])
    return pa.schema(
        [
            ("key", pa.string()),
            ("offset", pa.int64()),  # the sample's first tar header
            ("size", pa.int64()),  # up to and with the padding of its last member
            ("crc32c", pa.uint32()),  # of that range
            ("text_tokens", pa.int32()),  # one for every media placeholder
            ("images", pa.list_(image)),
            ("videos", pa.list_(video)),
            ("audios", pa.list_(audio)),
            ("members", pa.list_(member)),  # offsets of contents, counted from the start of the shard
        ]
    )
