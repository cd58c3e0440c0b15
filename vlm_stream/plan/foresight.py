"""When each shard will be read: arithmetic on the order of the epochs, without an index.

Enters: a planner, and where each source stands. Leaves: for each use of a shard the draws of the mixture between which
it lies. A group of shards is mixed as a whole, so all of them are in use from its first sample to its last.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.plan.planner import Planner
    from vlm_stream.plan.values import Ints

Floats = npt.NDArray[np.float64]

_EPOCHS: Final = 3  # the one that is begun, and what lies before the next table is made in the middle of this one
_PERHAPS: Final = 1e15  # draws after which uses stand that no epoch of the run has: whoever iterates again needs them


class ShardUses(NamedTuple):
    """n uses of shards, the next ones first."""

    sources: Ints
    """[n]"""
    shards: Ints
    """[n]"""
    begins: Floats
    """[n] Draws from now; below 0: the use has begun."""
    ends: Floats
    """[n]"""
    shares: Floats
    """[sources] Of the draws to come."""
    known: float
    """Draws from now before which no use is left out."""


def shard_uses(planner: Planner, positions: Sequence[float], most: int) -> ShardUses:
    """Return the next uses of all sources, about `most` of them or three epochs.

    Args:
        planner: Whose order it is.
        positions: Samples that were drawn from each source, over all epochs.
        most: How many; groups are given whole, also one after that which is begun.
    """
    terms = planner.terms
    shares, lefts = np.array(terms.shares), np.full(len(positions), np.inf)
    if terms.epochs is not None and terms.stop != "never":
        lefts = np.array([terms.epochs * stream.epoch_length for stream in planner.streams]) - positions
    if terms.stop == "each" and (shares[lefts > 0] > 0).any():  # who is through has left the mixture
        shares = np.where(lefts > 0, shares, 0.0) / shares[lefts > 0].sum()
    active = np.flatnonzero(np.array(terms.shares) > 0).tolist()
    draws_left = lefts / np.where(shares > 0, shares, 1.0)  # [sources]
    if terms.stop in ("all", "first"):
        draws_left[:] = (max if terms.stop == "all" else min)(draws_left[active])
    found: list[Floats] = []
    known = math.inf
    for number in active:
        stream, share, now = planner.streams[number], shares[number] or 1.0, positions[number]
        begin, num_found = 0.0, 0
        for first, last, group in stream.groups(int(now), now // stream.epoch_length + _EPOCHS):
            begin, end = (first - now) / share, (last - now) / share
            moved = _PERHAPS if begin >= draws_left[number] else 0.0
            found.append(np.stack(np.broadcast_arrays(number, group, begin + moved, end + moved)))
            num_found += len(group)
            if begin > 0 and num_found * len(active) >= most:
                break
        known = min(known, begin if begin < draws_left[number] else math.inf)
    table = np.concatenate(found, axis=1)  # [4, n]
    sources, shards, begins, ends = table[:, np.argsort(table[2], kind="stable")]
    return ShardUses(sources.astype(np.int64), shards.astype(np.int64), begins, ends, shares, known)
