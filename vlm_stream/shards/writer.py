"""One shard: samples in, a tar file and its rows out.

Enters: samples with their keys, in order. Leaves: the bytes of a tar, written front to back, and a row for each sample
with the place and the checksum of its bytes. It knows nothing of records, stores or other shards.
"""

from __future__ import annotations

import hashlib
from typing import IO, TYPE_CHECKING

import google_crc32c

from vlm_stream.shards.rows import MemberPlace, SampleRow
from vlm_stream.shards.tar import END_OF_TAR, member_header, padding

if TYPE_CHECKING:
    from vlm_stream.shards.sample import Sample

__all__ = ["ShardWriter"]


class ShardWriter:
    """Lays samples into a tar, one after the other."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to an open file, from its beginning."""
        self._file = file
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        self.rows: list[SampleRow] = []

    def add(self, key: str, sample: Sample, text_tokens: int) -> None:
        """Append one sample: all of its members, or nothing if it cannot be written."""
        begin = position = self.num_bytes
        crc = 0
        places = []
        for name, content in sample.members:
            header = member_header(f"{key}.{name}", len(content))
            places.append(MemberPlace(name, position + len(header), len(content)))
            for piece in (header, content, bytes(padding(len(content)))):
                crc = google_crc32c.extend(crc, piece)
                self._write(piece)
                position += len(piece)
        self.num_bytes = position
        self.rows.append(
            SampleRow(
                key=key,
                offset=begin,
                size=position - begin,
                crc32c=crc,
                text_tokens=text_tokens,
                sizes=sample.sizes,
                members=tuple(places),
            )
        )

    def finish(self) -> str:
        """Write the end of the tar; return the sha256 of the whole."""
        self._write(END_OF_TAR)
        self.num_bytes += len(END_OF_TAR)
        return self._digest.hexdigest()

    def _write(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._file.write(piece)
