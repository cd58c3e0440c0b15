"""One shard: samples in, a tar file and its rows out.

Enters: samples with their keys, in order. Leaves: the bytes of a tar, written front to back, and a row for each sample
with the place and the checksum of its bytes. It knows nothing of records, stores or other shards.

The tar as a whole gets a crc32c too: a sha256 of it would cost as much as reading and writing together.
"""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Final

import crc32c

from vlm_stream.convert.rows import SampleRow
from vlm_stream.convert.tar import END_OF_TAR, member_header, padding
from vlm_stream.storage import Member

if TYPE_CHECKING:
    from vlm_stream.convert.rows import SampleCounts
    from vlm_stream.convert.sample import Sample

__all__ = ["ShardWriter", "write_all"]

_BATCH_BYTES: Final = 1 << 20
"""Small samples are written together."""
_MAX_VECTORS: Final = 512
"""Pieces in one call; systems allow 1,024."""


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
