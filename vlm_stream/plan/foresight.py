"""When each shard will be read: arithmetic on the order of the epochs, without an index.

Enters: a planner, and where each source stands. Leaves: for each use of a shard the draws of the mixture between which
it lies. A group of shards is mixed as a whole, so all of them are in use from its first sample to its last.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.plan.planner import Planner
    from vlm_stream.plan.values import Ints


class ShardUses(NamedTuple):
    """n uses of shards, the next ones first."""

    sources: Ints
    """[n]"""
    shards: Ints
    """[n]"""
    begins: npt.NDArray[np.float64]
    """[n] Draws from now; below 0: the use has begun."""
    ends: npt.NDArray[np.float64]
    """[n]"""


def shard_uses(planner: Planner, positions: Sequence[int], most: int) -> ShardUses:
    """Return the next uses, about `most` of them, of all sources.

    Args:
        planner: Whose order it is.
        positions: Samples that were drawn from each source, over all epochs.
        most: How many; those of an epoch that is begun are given whole.
    """
    sources, shards, begins, ends = (list[Any]() for _ in range(4))
    epochs = planner.config.epochs
    active = [number for number, share in enumerate(planner.terms.shares) if share > 0]
    for number in active:
        stream, share, now = planner.streams[number], planner.terms.shares[number], positions[number]
        num_found = 0
        for begin, end, group in stream.groups(now, math.inf if epochs is None else epochs):
            shards += group.tolist()
            sources += [number] * len(group)
            begins += [(begin - now) / share] * len(group)
            ends += [(end - now) / share] * len(group)
            num_found += len(group)
            if num_found * len(active) >= most:
                break
    order = np.argsort(begins, kind="stable")
    return ShardUses(
        np.array(sources, dtype=np.int64)[order],
        np.array(shards, dtype=np.int64)[order],
        np.array(begins, dtype=np.float64)[order],
        np.array(ends, dtype=np.float64)[order],
    )
