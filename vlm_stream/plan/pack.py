"""Samples of one window -> packs: best-fit decreasing on residual capacity.

Enters: lengths, vision tokens, capacity. Leaves: the pack number of every sample. Longest first, each sample goes to
the open pack that it fills best; when none has room, a new one opens. It knows nothing of orders, windows or ranks.
Reports compare the result with a lower bound.

Open packs lie in stacks by their residual. A two-level bit set of the stacks in use (64 residuals to a word, one bit
for every word) finds the smallest sufficient residual in a few integer operations, for any capacity.

Plain Python on purpose: a compiled loop would bring a compiler's packages and its start-up time, and packing is a
small part of a step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["argsort_small", "best_fit_decreasing", "packs_lower_bound"]

_MAX_TRIES = 64  # packs looked at for one sample when a vision cap is set


def best_fit_decreasing(lengths: Ints, capacity: int, vision: Ints | None = None, vision_size: int = 0) -> Ints:
    """Return [n] the pack number of every sample; no length may exceed the capacity, no vision count its size.

    >>> best_fit_decreasing(np.array([3, 8, 2, 5]), 8).tolist()
    [1, 0, 2, 1]
    """
    order = argsort_small(capacity - lengths, capacity)
    packs = np.empty(len(lengths), dtype=np.int64)
    if vision is None:
        packs[order] = _pack_sorted(lengths[order].tolist(), capacity)
    else:
        packs[order] = _pack_sorted_capped(lengths[order].tolist(), capacity, vision[order].tolist(), vision_size)
    return packs


def argsort_small(values: Ints, most: int) -> Ints:
    """Sort whole numbers from 0 to `most`, stably; numpy sorts 16-bit numbers by radix."""
    return np.argsort(values.astype(np.uint16 if most < 1 << 16 else np.int64), kind="stable")


def _pack_sorted(lengths: list[int], capacity: int) -> list[int]:
    stacks: dict[int, list[int]] = {}  # packs by residual
    low = [0] * ((capacity >> 6) + 1)  # bit r & 63 of word r >> 6: stack r is in use
    high = 0  # bit w: word w is not zero
    bit = [1 << k for k in range(64)]
    out: list[int] = []
    put = out.append
    num_packs = 0
    for length in lengths:
        word = length >> 6
        found = low[word] >> (length & 63)
        if found:
            residual = length + (found & -found).bit_length() - 1
        else:
            above = high >> (word + 1)
            if above:
                word += (above & -above).bit_length()
                found = low[word]
                residual = (word << 6) + (found & -found).bit_length() - 1
            else:
                residual = -1
        if residual < 0:
            pack = num_packs
            num_packs += 1
            rest = capacity - length
        else:
            stack = stacks[residual]
            pack = stack.pop()
            if not stack:
                word = residual >> 6
                low[word] ^= bit[residual & 63]
                if not low[word]:
                    high ^= 1 << word
            rest = residual - length
        put(pack)
        word = rest >> 6
        flags = low[word]
        if flags & bit[rest & 63]:
            stacks[rest].append(pack)
        else:
            stacks[rest] = [pack]
            if not flags:
                high |= 1 << word
            low[word] = flags | bit[rest & 63]
    return out


def _pack_sorted_capped(lengths: list[int], capacity: int, vision: list[int], vision_size: int) -> list[int]:
    """Like `_pack_sorted`, with a second cap: packs are tried from the tightest fit upwards, a bounded number."""
    stacks: dict[int, list[int]] = {}
    used: list[int] = []  # residuals in use, ascending
    room: list[int] = []  # vision tokens that each pack can still take
    out: list[int] = []
    for length, seen in zip(lengths, vision, strict=True):
        pack, rest = _find_capped(length, seen, stacks, used, room)
        if pack < 0:
            pack, rest = len(room), capacity - length
            room.append(vision_size)
        room[pack] -= seen
        if rest not in stacks:
            stacks[rest] = []
            insort(used, rest)
        stacks[rest].append(pack)
        out.append(pack)
    return out


def _find_capped(
    length: int, seen: int, stacks: dict[int, list[int]], used: list[int], room: list[int]
) -> tuple[int, int]:
    """Take the tightest pack with room for both out of its stack; return it and its new residual, or (-1, 0)."""
    tries = _MAX_TRIES
    for at in range(bisect_left(used, length), len(used)):
        stack = stacks[used[at]]
        for place in range(len(stack) - 1, -1, -1):
            if room[stack[place]] >= seen:
                residual = used[at]
                pack = stack.pop(place)
                if not stack:
                    del stacks[residual]
                    del used[at]
                return pack, residual - length
            tries -= 1
            if not tries:
                return -1, 0
    return -1, 0


def packs_lower_bound(lengths: Ints, capacity: int) -> int:
    """Return how few packs any packing could need: the bound L2 of Martello and Toth, the largest over thresholds k.

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
