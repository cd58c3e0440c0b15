"""One window's samples -> its units: packs, groups or single samples, and what is carried to the next window.

Enters: samples, a mode, a key for this window's permutation. Leaves: `Cut`. Samples that are too long for a unit are
dropped or truncated, and always named. This is the part of the plan that the mode decides; nothing here knows ranks,
steps or sources.

Grouped by count, the unit stays the single sample: a micro-batch is any number of neighbours, so the batch size may
change at a resume. Only a budget of padded tokens makes the group itself the unit.

Packs are made by best-fit decreasing on residual capacity: longest first, each sample goes to the open pack that it
fills best; when none has room, a new one opens. Reports compare the result with a lower bound.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from vlm_stream.plan.order import Samples
from vlm_stream.plan.randomness import Key, permutation
from vlm_stream.plan.values import Dropped, GroupConfig, Ints, PackConfig, PlainConfig, Ref, take_rows

Mode = PackConfig | GroupConfig | PlainConfig

# Part of the stream: other values change the order of samples. Tests make them smaller.
CHUNK_UNITS: Final = 256
"""Grouped units that are neighbours in length and stay together: at least the units of a step, or its ranks meet two
lengths. It does not follow the world size."""
CARRY_SAMPLES: Final = 512  # most samples that under-filled packs give back to the next window
CARRY_WINDOWS: Final = 4  # windows through which one sample may be carried

_MAX_TRIES = 64  # packs looked at for one sample when a vision cap is set
_FULL = 0.995  # a pack at least this full is never given back: another round could gain next to nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """What became of a window's samples."""

    samples: Samples  # [n] Those in units, unit after unit
    splits: Ints  # [units + 1] Unit u owns the samples `splits[u]:splits[u + 1]`
    carry: Samples  # those given back, one window older
    dropped: tuple[Dropped, ...]


def cut_units(samples: Samples, mode: Mode, key: Key | None, *, last: bool) -> Cut:
    """Cut a window into units, permuted by the key or, without one, in their own order; the `last` carries nothing."""
    if isinstance(mode, PackConfig):
        return _packs(samples, mode, key, last=last)
    samples, dropped = _fit(samples, max_tokens=mode.max_tokens, max_vision=None, rule=mode.long_samples)
    carry = Samples.none()
    if isinstance(mode, PlainConfig):
        return Cut(samples=samples, splits=np.arange(len(samples) + 1), carry=carry, dropped=dropped)
    samples = samples.pick(np.argsort(-samples.tokens, kind="stable"))
    if mode.token_budget is None:
        order = permute_chunks(len(samples), CHUNK_UNITS, key)
        return Cut(samples=samples.pick(order), splits=np.arange(len(samples) + 1), carry=carry, dropped=dropped)
    splits, num_full = budget_groups(samples.tokens, mode.token_budget)
    if not last and num_full < len(splits) - 1 and samples.age[splits[num_full] :].max(initial=0) < CARRY_WINDOWS:
        carry = _older(samples.pick(np.arange(splits[num_full], len(samples))))
        splits = splits[: num_full + 1]
    order = permute_chunks(len(splits) - 1, CHUNK_UNITS, key)
    members, splits = take_rows(splits, order)
    return Cut(samples=samples.pick(members), splits=splits, carry=carry, dropped=dropped)


def _packs(samples: Samples, mode: PackConfig, key: Key | None, *, last: bool) -> Cut:
    samples, dropped = _fit(samples, max_tokens=mode.pack_size, max_vision=mode.vision_size, rule=mode.long_samples)
    if not len(samples):
        return Cut(samples=samples, splits=np.zeros(1, dtype=np.int64), carry=Samples.none(), dropped=dropped)
    # An empty sample counts as one token, or one row would hold any number of them. One that is longer than the
    # capacity, but not than the row, gets a row of its own.
    lengths = -(-np.maximum(samples.tokens, 1) // mode.alignment) * mode.alignment
    lengths = np.minimum(lengths, mode.capacity)
    capped = mode.vision_size is not None and int(samples.vision.sum()) > mode.vision_size
    packs = best_fit_decreasing(lengths, mode.capacity, samples.vision if capped else None, mode.vision_size or 0)
    num_packs = int(packs.max()) + 1
    given_back = np.zeros(num_packs, dtype=bool) if last else _given_back(packs, lengths, samples.age, mode)
    place = np.empty(num_packs, dtype=np.int64)  # pack -> place in the stream; those given back stand after it
    kept = np.flatnonzero(~given_back)
    if key is not None:
        kept = kept[permutation(key, len(kept))]
    else:
        first = np.full(num_packs, len(packs))
        np.minimum.at(first, packs, np.arange(len(packs)))
        kept = kept[np.argsort(first[kept], kind="stable")]
    place[kept] = np.arange(len(kept))
    place[given_back] = len(kept)
    where = place[packs]  # [n]
    members = np.argsort(where, kind="stable")
    splits = np.concatenate([[0], np.cumsum(np.bincount(where, minlength=len(kept))[: len(kept)])])
    carry = _older(samples.pick(members[splits[-1] :]))
    members = members[: splits[-1]]
    return Cut(samples=samples.pick(members), splits=splits, carry=carry, dropped=dropped)


def _given_back(packs: Ints, lengths: Ints, age: Ints, mode: PackConfig) -> npt.NDArray[np.bool_]:
    """Choose the packs whose samples wait for the next window: the emptiest, until `CARRY_SAMPLES` are reached."""
    num_packs = int(packs.max()) + 1
    fill = np.bincount(packs, weights=lengths, minlength=num_packs).astype(np.int64)
    size = np.bincount(packs, minlength=num_packs)
    oldest = np.zeros(num_packs, dtype=np.int64)
    np.maximum.at(oldest, packs, age)
    open_packs = np.flatnonzero((fill < _FULL * mode.capacity) & (oldest < CARRY_WINDOWS))
    emptiest = open_packs[np.argsort(fill[open_packs], kind="stable")]
    # Half the samples at most: a window that gives everything back would never deliver.
    fits = np.cumsum(size[emptiest]) <= min(CARRY_SAMPLES, len(packs) // 2)
    chosen = np.zeros(num_packs, dtype=bool)
    chosen[emptiest[fits]] = True
    return chosen


def _older(samples: Samples) -> Samples:
    return sort_carried(replace(samples, age=samples.age + 1))


def sort_carried(samples: Samples) -> Samples:
    """Return samples in the order in which they are carried, which a state does not have to keep."""
    refs = samples.refs
    return samples.pick(np.lexsort((samples.position, samples.age, refs[:, 2], refs[:, 1], refs[:, 0])))


def _fit(
    samples: Samples, *, max_tokens: int | None, max_vision: int | None, rule: str
) -> tuple[Samples, tuple[Dropped, ...]]:
    """Apply the rule to samples above a limit and keep the order of the others; `raise` is left to the caller."""
    if max_tokens is None and max_vision is None:
        return samples, ()
    long = samples.tokens > max_tokens if max_tokens is not None else np.zeros(len(samples), dtype=bool)
    wide = samples.vision > max_vision if max_vision is not None else np.zeros(len(samples), dtype=bool)
    if not long.any() and not wide.any():
        return samples, ()
    notes: list[Dropped] = []
    gone = wide if rule == "truncate" else long | wide
    notes += _notes(samples, gone & wide, "too_much_vision")
    notes += _notes(samples, gone & ~wide, "too_long")
    if rule == "truncate":
        # a carried sample was named when it first came.
        notes += _notes(samples, long & ~wide & (samples.age == 0), "truncated")
        if long.any():  # how many labels are cut off is not known here
            tokens, labels = np.minimum(samples.tokens, max_tokens or 0), np.where(long, -1, samples.labels)
            samples = replace(samples, tokens=tokens, labels=labels)
    return samples.pick(~gone), tuple(notes)


def _notes(samples: Samples, which: npt.NDArray[np.bool_], reason: str) -> list[Dropped]:
    rows = np.flatnonzero(which)
    return [
        Dropped(ref=Ref(*ref), reason=reason, tokens=tokens, vision_tokens=vision)
        for ref, tokens, vision in zip(
            samples.refs[rows].tolist(), samples.tokens[rows].tolist(), samples.vision[rows].tolist(), strict=True
        )
    ]


def budget_groups(lengths: Ints, budget: int) -> tuple[Ints, int]:
    """Cut lengths, longest first, into groups of rows x longest row <= budget.

    Returns:
        [groups + 1] Where groups begin and end, and the number of groups that took all they could.

    >>> budget_groups(np.array([6, 5, 4, 4, 3]), 12)
    (array([0, 2, 5]), 2)
    """
    splits = [0]
    begin, num = 0, len(lengths)
    num_full = 0
    while begin < num:
        rows = budget // max(int(lengths[begin]), 1)
        end = min(begin + rows, num)
        num_full += end - begin == rows
        splits.append(end)
        begin = end
    return np.asarray(splits, dtype=np.int64), num_full


def permute_chunks(num_units: int, chunk: int, key: Key | None) -> Ints:
    """Return [num_units] the units in permuted chunks of neighbours; as they are without a key."""
    if key is None:
        return np.arange(num_units)
    num_chunks = -(-num_units // chunk)
    begins = permutation(key, num_chunks) * chunk
    order = (begins[:, None] + np.arange(chunk)[None, :]).ravel()  # [num_chunks * chunk]
    return order[order < num_units]


def best_fit_decreasing(lengths: Ints, capacity: int, vision: Ints | None = None, vision_size: int = 0) -> Ints:
    """Return [n] the pack number of every sample; no length may exceed the capacity, no vision count its size.

    >>> best_fit_decreasing(np.array([3, 8, 2, 5]), 8).tolist()
    [1, 0, 2, 1]
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order].tolist()
    packs = np.empty(len(lengths), dtype=np.int64)
    if vision is None:
        packs[order] = _pack_sorted(falling, capacity)
    else:
        packs[order] = _pack_capped(falling, capacity, vision[order].tolist(), vision_size)
    return packs


def _pack_sorted(lengths: list[int], capacity: int) -> list[int]:
    """Pack samples, longest first, each into the newest pack of the least residual that has room for it.

    Every rank packs all samples of the stream: this loop is most of what a plan costs in a large world.
    """
    stacks: dict[int, list[int]] = {}  # packs by residual
    used: list[int] = []  # residuals in use, ascending
    out: list[int] = []
    num_packs = 0
    least = lengths[-1] if lengths else 0  # what has less room than this is never taken again
    for length in lengths:
        at = bisect_left(used, length)
        if at < len(used):
            rest = used[at] - length
            stack = stacks[used[at]]
            pack = stack.pop()
            if not stack:
                del stacks[used.pop(at)]
        else:
            pack, rest = num_packs, capacity - length
            num_packs += 1
        out.append(pack)
        if rest >= least:
            if rest in stacks:
                stacks[rest].append(pack)
            else:
                stacks[rest] = [pack]
                insort(used, rest)
    return out


def _pack_capped(lengths: list[int], capacity: int, vision: list[int], vision_size: int) -> list[int]:
    """Do the same where vision tokens are limited, too; a bounded number of packs is tried, from the tightest on."""
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
