"""How many requests and bytes a store would see for a set of samples.

Enters: refs with byte ranges, already sorted into the batches that are fetched together. Leaves: counts. The rule is
that of the readers: ranges of one shard are joined over gaps of up to 256 KB, no request above 16 MB is made by
joining.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["MAX_GAP_BYTES", "MAX_REQUEST_BYTES", "count_requests"]

MAX_GAP_BYTES = 256 * 1024
MAX_REQUEST_BYTES = 16 * 1024 * 1024


def count_requests(batch: Ints, shard: Ints, offset: Ints, num_bytes: Ints) -> tuple[int, int]:
    """Return the requests that all batches together need, and their bytes, gaps included.

    Args:
        batch: [n] What is fetched together.
        shard: [n] A number for each (source, shard).
        offset: [n] First byte.
        num_bytes: [n] Length of the range.

    >>> count_requests(*(np.array(column) for column in ([0, 0, 0], [1, 1, 1], [0, 100, 10**6], [50, 50, 50])))
    (2, 200)
    """
    if not len(batch):
        return 0, 0
    order = np.lexsort((offset, shard, batch))
    batch, shard, begin = batch[order], shard[order], offset[order]
    end = begin + num_bytes[order]
    near = (batch[1:] == batch[:-1]) & (shard[1:] == shard[:-1]) & (begin[1:] - end[:-1] <= MAX_GAP_BYTES)
    splits = np.flatnonzero(~near) + 1
    runs = zip([0, *splits.tolist()], [*splits.tolist(), len(begin)], strict=True)
    requests, total = 0, 0
    for first, last in runs:
        if last - first == 1:
            requests += 1
            total += int(end[first] - begin[first])
            continue
        for low, high in _cut(begin[first:last].tolist(), end[first:last].tolist()):
            requests += 1
            total += high - low
    return requests, total


def _cut(begins: list[int], ends: list[int]) -> list[tuple[int, int]]:
    """Join neighbouring ranges, closing a request before it grows above its limit."""
    out = [(begins[0], ends[0])]
    for begin, end in zip(begins[1:], ends[1:], strict=True):
        low, high = out[-1]
        if max(end, high) - low > MAX_REQUEST_BYTES:
            out.append((begin, end))
        else:
            out[-1] = (low, max(end, high))
    return out
