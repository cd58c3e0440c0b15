"""Samples of one window -> packs: best-fit decreasing on residual capacity.

Enters: lengths, vision tokens, capacity. Leaves: the pack number of every sample. Longest first, each sample goes to
the open pack that it fills best; when none has room, a new one opens. It knows nothing of orders, windows or ranks.
Reports compare the result with a lower bound.
"""

from bisect import bisect_left, insort

import numpy as np

from vlm_stream.plan.values import Ints

_MAX_TRIES = 64  # packs looked at for one sample when a vision cap is set


def best_fit_decreasing(lengths: Ints, capacity: int, vision: Ints | None = None, vision_size: int = 0) -> Ints:
    """Return [n] the pack number of every sample; no length may exceed the capacity, no vision count its size.

    >>> best_fit_decreasing(np.array([3, 8, 2, 5]), 8).tolist()
    [1, 0, 2, 1]
    """
    order = np.argsort(-lengths, kind="stable")
    seen = np.zeros(len(lengths), dtype=np.int64) if vision is None else vision
    packs = np.empty(len(lengths), dtype=np.int64)
    packs[order] = _pack_sorted(lengths[order].tolist(), capacity, seen[order].tolist(), vision_size)
    return packs


def _pack_sorted(lengths: list[int], capacity: int, vision: list[int], vision_size: int) -> list[int]:
    """Pack samples, longest first; packs are tried from the tightest fit upwards, a bounded number."""
    stacks: dict[int, list[int]] = {}  # packs by residual
    used: list[int] = []  # residuals in use, ascending
    room: list[int] = []  # vision tokens that each pack can still take
    out: list[int] = []
    for length, seen in zip(lengths, vision, strict=True):
        pack, rest = _take_tightest(length, seen, stacks, used, room)
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


def _take_tightest(
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
