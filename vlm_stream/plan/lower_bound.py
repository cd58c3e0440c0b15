"""How few packs any packing could need: the bound L2 of Martello and Toth.

Enters: lengths and a capacity. Leaves: a number of packs that no algorithm can go below; the report compares with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["packs_lower_bound"]


def packs_lower_bound(lengths: npt.NDArray[np.int64], capacity: int) -> int:
    """Return L2, the largest bound over all thresholds k.

    Samples above `capacity - k` fill a pack alone (as far as those of k and more go); the others above half a capacity
    have a pack each; what those packs cannot take of the samples from k to half a capacity needs packs of its own.

    >>> packs_lower_bound(np.array([6, 6, 6, 3, 3, 3]), 10)
    3
    >>> packs_lower_bound(np.array([5, 5, 5, 7, 7]), 10)
    4
    """
    if not len(lengths):
        return 0
    rising = np.sort(np.asarray(lengths, dtype=np.int64))
    totals = np.concatenate([[0], np.cumsum(rising)])
    half = int(np.searchsorted(rising, capacity // 2, side="right"))  # samples up to half a capacity stand before it
    k = np.unique(np.append(rising[:half], 0))  # [t] thresholds
    alone = np.searchsorted(rising, capacity - k, side="right")  # samples that fill a pack alone stand from here on
    small = np.searchsorted(rising, k, side="left")
    num_large = len(rising) - half
    room = (alone - half) * capacity - (totals[alone] - totals[half])
    spare = np.maximum(totals[half] - totals[small] - room, 0)
    return int((num_large + -(-spare // capacity)).max())
