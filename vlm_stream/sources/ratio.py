"""`sample_ratio` and rank shares as orders of record numbers: pure functions, no records."""

from __future__ import annotations

import random
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import SourceError

__all__ = ["Order", "rank_share", "sample_order"]

Order: TypeAlias = npt.NDArray[np.int64]

_SEED = 42


def sample_order(num_records: int, ratio: float) -> Order | None:
    """Return which records a ratio takes, in order; None when that is all of them as they stand.

    Below 1 it is a random choice in random order, `Random(42).sample(range(n), floor(n * ratio))`, but never less than
    one record; above 1 whole repeats, then a random choice for the fraction.

    >>> sample_order(10, 0.5).tolist()
    [1, 0, 4, 9, 6]
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < float("inf"):
        raise SourceError(
            f"sample_ratio is {ratio!r}, which takes no sample; write a number above 0, "
            "or leave the entry out with the names filter."
        )
    if ratio == 1:
        return None
    if not num_records:
        return np.zeros(0, np.int64)
    if ratio < 1:
        return _choose(num_records, max(1, int(num_records * ratio)))
    repeats = int(ratio)
    whole = np.tile(np.arange(num_records, dtype=np.int64), repeats)
    return np.concatenate([whole, _choose(num_records, int(num_records * (ratio - repeats)))])


def rank_share(order: Order | None, num_records: int, rank: int, world_size: int, begin: int = 0) -> Order:
    """Return every `world_size`-th entry of an order, for one rank.

    `begin` is how many entries of earlier sources were dealt out before: dealing goes on where it stopped, so over all
    sources the ranks differ by one entry at most, every entry has one rank, and none is dropped.
    """
    first = (rank - begin) % world_size
    if order is None:
        return np.arange(first, num_records, world_size, dtype=np.int64)
    return order[first::world_size]


def _choose(num_records: int, num_chosen: int) -> Order:
    return np.array(random.Random(_SEED).sample(range(num_records), num_chosen), np.int64)
