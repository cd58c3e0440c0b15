"""Which record goes into which shard, fixed before the first byte is written.

Enters: how many records there are, a seed, limits, and with a byte limit the sizes of all samples. Leaves: the order of
the records (8 bytes each) and the borders of the shards.

With a limit of samples alone a border is a multiplication. A limit of bytes needs sizes, and a shard must stay a
function of its own records, so sizes come from a pass over all records before anything is written (JSON read, media
only asked for their size); the borders are then kept with the job. A record that proves bad later leaves its shard
smaller and no border moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.convert.media_bytes import MediaReader
from vlm_stream.convert.sample import sample_bytes_bound
from vlm_stream.errors import blame_sample
from vlm_stream.plan import mix64

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.convert.engines import Engine
    from vlm_stream.sources import RecordSource
    from vlm_stream.storage import StoreOptions

__all__ = ["cut_by_bytes", "cut_by_count", "measure_records", "record_order"]

_CHUNK: Final = 2000


def record_order(
    num_records: int, seed: int | None, block_ends: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Return the record numbers in the order of the shards: sorted by a hash of (seed, number).

    Where records are cheap only in blocks, blocks are sorted so, and the records of each: every block is read once.

    A hash and a stable sort, because the permutations of random generators may change with their library's version.
    """
    if seed is None:
        return np.arange(num_records, dtype=np.int64)
    with np.errstate(over="ignore"):
        hashes = mix64(np.arange(num_records, dtype=np.uint64) + mix64(np.array([seed], dtype=np.uint64)))
    if block_ends is not None:
        blocks = np.searchsorted(block_ends, np.arange(num_records), side="right")
        return np.lexsort((hashes, hashes[blocks])).astype(np.int64)
    return np.argsort(hashes, kind="stable")


def cut_by_count(num_records: int, samples_per_shard: int) -> npt.NDArray[np.int64]:
    """Return the borders: shard i holds the positions `borders[i]:borders[i + 1]` of the order.

    >>> cut_by_count(5, 2).tolist()
    [0, 2, 4, 5]
    """
    begins = np.arange(0, num_records, samples_per_shard, dtype=np.int64)
    return np.append(begins, num_records).astype(np.int64)


def cut_by_bytes(sizes: npt.NDArray[np.int64], samples_per_shard: int, max_shard_bytes: int) -> npt.NDArray[np.int64]:
    """Return the borders under both limits; a sample beyond the limit is alone in its shard.

    Args:
        sizes: [positions] Most bytes that each sample takes in a tar, in the order of the shards.
        samples_per_shard: Most samples in a shard.
        max_shard_bytes: Most bytes in a shard.

    >>> cut_by_bytes(np.array([4, 4, 9, 1, 1]), 2, 8).tolist()
    [0, 2, 3, 5]
    """
    ends = np.cumsum(sizes)  # [positions]
    borders = [0]
    while (begin := borders[-1]) < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        fits = int(np.searchsorted(ends, before + max_shard_bytes, side="right"))
        borders.append(max(begin + 1, min(fits, begin + samples_per_shard)))
    return np.array(borders, dtype=np.int64)


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
