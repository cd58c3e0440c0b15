"""One window's samples -> its units: packs, groups or single samples, and what is carried to the next window.

Enters: samples, a mode, a key for this window's permutation. Leaves: `Cut`. This is the part of the plan that the mode
decides; nothing here knows ranks, steps or positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.plan.fit import fit_samples
from vlm_stream.plan.group import GroupConfig, PlainConfig, budget_groups, permute_blocks
from vlm_stream.plan.pack import PackConfig, argsort_small, best_fit_decreasing
from vlm_stream.plan.randomness import Key, permutation
from vlm_stream.plan.samples import Samples
from vlm_stream.ragged import take_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.plan.values import Dropped

    Ints = npt.NDArray[np.int64]
    Mode = PackConfig | GroupConfig | PlainConfig

__all__ = ["Cut", "cut_units"]

_FULL = 0.995  # a pack at least this full is never given back: another round could gain next to nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """What became of a window's samples."""

    samples: Samples
    """[n] Those in units, unit after unit."""
    splits: Ints
    """[units + 1] Unit u owns the samples `splits[u]:splits[u + 1]`."""
    carry: Samples
    """Those given back, one window older."""
    dropped: tuple[Dropped, ...]


def cut_units(samples: Samples, mode: Mode, key: Key | None, *, last: bool) -> Cut:
    """Cut a window into units, permuted by the key or, without one, in their own order; the `last` carries nothing."""
    if isinstance(mode, PackConfig):
        return _packs(samples, mode, key, last=last)
    samples, dropped = fit_samples(samples, max_tokens=mode.max_tokens, max_vision=None, rule=mode.long_samples)
    nothing = Samples.empty()
    if isinstance(mode, PlainConfig):
        return Cut(samples=samples, splits=np.arange(len(samples) + 1), carry=nothing, dropped=dropped)
    samples = samples.pick(np.argsort(-samples.tokens, kind="stable"))
    if mode.token_budget is None:
        order = permute_blocks(len(samples), mode.block_units, key)
        return Cut(samples=samples.pick(order), splits=np.arange(len(samples) + 1), carry=nothing, dropped=dropped)
    splits, num_full = budget_groups(samples.tokens, mode.token_budget)
    if not last and num_full < len(splits) - 1 and samples.age[splits[num_full] :].max(initial=0) < mode.carry_windows:
        nothing = _older(samples.pick(np.arange(splits[num_full], len(samples))))
        splits = splits[: num_full + 1]
    order = permute_blocks(len(splits) - 1, mode.block_units, key)
    return _reorder(samples, splits, order, nothing, dropped)


def _packs(samples: Samples, mode: PackConfig, key: Key | None, *, last: bool) -> Cut:
    samples, dropped = fit_samples(
        samples, max_tokens=mode.pack_size, max_vision=mode.vision_size, rule=mode.long_samples
    )
    if not len(samples):
        return Cut(samples=samples, splits=np.zeros(1, dtype=np.int64), carry=Samples.empty(), dropped=dropped)
    # An empty sample counts as one token, or one row would hold any number of them. One that is longer than the
    # capacity, but not than the row, gets a row of its own.
    lengths = -(-np.maximum(samples.tokens, 1) // mode.alignment) * mode.alignment
    lengths = np.minimum(lengths, mode.capacity)
    capped = mode.vision_size is not None and int(samples.vision.sum()) > mode.vision_size
    packs = best_fit_decreasing(lengths, mode.capacity, samples.vision if capped else None, mode.vision_size or 0)
    num_packs = int(packs.max()) + 1
    given_back = np.zeros(num_packs, dtype=bool) if last else _given_back(packs, lengths, samples.age, mode)
    place = np.empty(num_packs, dtype=np.int64)  # pack -> place in the stream; those given back stand behind it
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
    members = argsort_small(where, len(kept))
    splits = np.concatenate([[0], np.cumsum(np.bincount(where, minlength=len(kept))[: len(kept)])])
    carry = _older(samples.pick(members[splits[-1] :]))
    members = members[: splits[-1]]
    return Cut(samples=samples.pick(members), splits=splits, carry=carry, dropped=dropped)


def _given_back(packs: Ints, lengths: Ints, age: Ints, mode: PackConfig) -> npt.NDArray[np.bool_]:
    """Choose the packs whose samples wait for the next window: the emptiest, until `carry_samples` are reached."""
    num_packs = int(packs.max()) + 1
    fill = np.bincount(packs, weights=lengths, minlength=num_packs).astype(np.int64)
    size = np.bincount(packs, minlength=num_packs)
    oldest = np.zeros(num_packs, dtype=np.int64)
    np.maximum.at(oldest, packs, age)
    open_packs = np.flatnonzero((fill < _FULL * mode.capacity) & (oldest < mode.carry_windows))
    emptiest = open_packs[np.argsort(fill[open_packs], kind="stable")]
    # Half the samples at most: a window that gives everything back would never deliver.
    fits = np.cumsum(size[emptiest]) <= min(mode.carry_samples, len(packs) // 2)
    chosen = np.zeros(num_packs, dtype=bool)
    chosen[emptiest[fits]] = True
    return chosen


def _older(samples: Samples) -> Samples:
    """Return samples one window older, in the order in which a state lists them."""
    refs = samples.refs
    order = np.lexsort((samples.age, refs[:, 2], refs[:, 1], refs[:, 0]))
    samples = samples.pick(order)
    return replace(samples, age=samples.age + 1)


def _reorder(samples: Samples, splits: Ints, order: Ints, carry: Samples, dropped: tuple[Dropped, ...]) -> Cut:
    """Put units into another order."""
    members, splits = take_rows(splits, order)
    return Cut(samples=samples.pick(members), splits=splits, carry=carry, dropped=dropped)
