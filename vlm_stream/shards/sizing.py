"""How many bytes each sample will take, asked of all records before anything is written.

Enters: a source and an engine. Leaves: a number per record. Media are only asked for their size. Cost: every record is
parsed once more, and a stat (or, for a remote medium, one request) for each medium.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import blame_sample
from vlm_stream.shards.media_bytes import MediaReader
from vlm_stream.shards.sample import sample_bytes_bound

if TYPE_CHECKING:
    from vlm_stream.shards.engines import Engine
    from vlm_stream.sources import RecordSource
    from vlm_stream.storage import StoreOptions

__all__ = ["measure_records"]

_CHUNK: Final = 2000


@dataclass(frozen=True, slots=True, eq=False)
class _Sizer:
    """Measures `_CHUNK` records from a given one on."""

    source: RecordSource
    options: StoreOptions | None

    def __call__(self, begin: int) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]]]:
        """Return `begin` and the sizes."""
        reader = MediaReader(options=self.options)
        end = min(begin + _CHUNK, len(self.source))
        return begin, np.array([self._measure(number, reader) for number in range(begin, end)], dtype=np.int64)

    def _measure(self, number: int, reader: MediaReader) -> int:
        try:
            return sample_bytes_bound(self.source.read(number), reader)
        except Exception as error:
            blame_sample(error, "convert", "bad_record", "the record cannot be measured")
            return 0  # it will not be in any shard


def measure_records(
    source: RecordSource, engine: Engine, options: StoreOptions | None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return at most how many bytes each record takes in a tar: [records]."""
    sizes = np.zeros(len(source), dtype=np.int64)
    for begin, chunk in engine.run(_Sizer(source, options), range(0, len(source), _CHUNK)):
        sizes[begin : begin + len(chunk)] = chunk
    return sizes
