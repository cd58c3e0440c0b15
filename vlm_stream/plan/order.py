"""One source as an endless row of epochs: which sample stands at position p, and what the plan must know of it.

Enters: shard sizes, a key with the seed, a `ColumnReader`. Leaves: `Samples`, arrays with a row per sample. Shards are
permuted, taken in groups of K, and a group's samples are permuted as a whole. Columns are kept for the live group, two
groups at most (a window may straddle their border): about 24 bytes a sample with its place in the permutation. Only
the layout of an epoch, two numbers per shard, grows with the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import DatasetError
from vlm_stream.plan.balance import vit_cost
from vlm_stream.plan.randomness import Key, permutation
from vlm_stream.plan.values import (
    ColumnReader,
    CostConfig,
    Countable,
    Ints,
    OrderConfig,
    PlanConfig,
    SourceSpec,
    take_rows,
)

_SMALL_SOURCE = 1 << 18  # samples whose columns are kept for good
_SAMPLES_AT_ONCE = 1 << 18  # that a reader is asked for
_COUNT_ALL = 0.875  # what is left of such samples is counted at once when it is no more than this


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochLayout:
    """One epoch of one source, shard by shard."""

    shards: Ints  # [s] Shard numbers in the order in which the epoch meets them
    quotas: Ints  # [s] How many samples each of them delivers
    group_begins: Ints  # [groups + 1] Position at which each group of shards begins

    def group_at(self, position: int) -> int:
        return int(np.searchsorted(self.group_begins, position, side="right")) - 1


def epoch_length(spec: SourceSpec) -> int:
    """Return how many samples one epoch of the source delivers; the same in every epoch."""
    # The tiny term keeps 0.1 * 30 from being 2 samples.
    return int(np.floor(spec.num_samples * spec.sample_ratio + 1e-9))


def epoch_layout(spec: SourceSpec, key: Key, config: OrderConfig, *, shuffle: bool) -> EpochLayout:
    """Lay out one epoch; `key` carries seed, source and epoch."""
    sizes = np.asarray(spec.samples_per_shard, dtype=np.int64)  # [s]
    shards = permutation(_for(key, "shards"), len(sizes)) if shuffle else np.arange(len(sizes), dtype=np.int64)
    quotas = sizes if spec.sample_ratio == 1.0 else _quotas(sizes, spec.sample_ratio, _for(key, "quota"))
    quotas = quotas[shards]
    ends = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(quotas, out=ends[1:])
    num_groups = max(-(-len(sizes) // config.group_shards), 1)
    begins = ends[np.minimum(np.arange(num_groups + 1) * config.group_shards, len(sizes))]
    return EpochLayout(shards=shards, quotas=quotas, group_begins=begins)


def _quotas(sizes: Ints, ratio: float, key: Key) -> Ints:
    """Share an epoch of `ratio` of the samples out among shards, each within one sample of its due.

    The running total is rounded over a permutation of the shards that differs between epochs, so that no shard always
    loses by the rounding.
    """
    turn = permutation(key, len(sizes))
    totals = np.floor(np.cumsum(sizes[turn]) * ratio + 1e-9).astype(np.int64)
    quotas = np.empty_like(sizes)
    quotas[turn] = np.diff(totals, prepend=0)
    return quotas


def group_entries(sizes: Ints, quotas: Ints, shards: Ints, key: Key, run_length: int | None) -> npt.NDArray[np.int32]:
    """Return the samples of one group of shards in the order in which they are delivered.

    Args:
        sizes: [k] Samples that each shard holds.
        quotas: [k] Samples that each shard delivers.
        shards: [k] Shard numbers, for the keys of their subsets.
        key: Carries seed, source, epoch and the group's number.
        run_length: Neighbours that stay together, or None to keep the order of the tars.

    Returns:
        [sum(quotas)] Positions in the concatenation of the k shards.
    """
    is_whole = np.array_equal(sizes, quotas)
    entries = np.arange(int(sizes.sum())) if is_whole else _subset(sizes, quotas, shards, key)
    if run_length is None:
        return entries.astype(np.int32)
    if run_length == 1:
        order = permutation(_for(key, "samples"), len(entries))
        return (order if is_whole else entries[order]).astype(np.int32)
    # Runs are cut shard by shard: quotas [5, 3] and run_length 2 give run numbers [0 0 1 1 2 | 3 3 4].
    runs_per_shard = -(-quotas // run_length)
    first_run = np.concatenate([[0], np.cumsum(runs_per_shard)])
    place = np.arange(len(entries)) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    run = np.repeat(first_run[:-1], quotas) + place // run_length
    rank = np.empty(int(first_run[-1]), dtype=np.int64)
    rank[permutation(_for(key, "runs"), len(rank))] = np.arange(len(rank))
    return entries[np.argsort(rank[run], kind="stable")].astype(np.int32)


def _subset(sizes: Ints, quotas: Ints, shards: Ints, key: Key) -> Ints:
    """Choose rows: all of a shard as often as its quota holds it whole, and a keyed choice for the rest."""
    parts = []
    begin = 0
    for size, quota, shard in zip(sizes.tolist(), quotas.tolist(), shards.tolist(), strict=True):
        whole, rest = divmod(quota, size) if size else (0, 0)
        chosen = permutation(_for(key, "subset", shard), size)[:rest]
        rows = np.concatenate([np.repeat(np.arange(size, dtype=np.int64), whole), chosen])
        parts.append(np.sort(rows) + begin)
        begin += size
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _for(key: Key, purpose: str, index: int | None = None) -> Key:
    return replace(key, purpose=purpose, index=key.index if index is None else index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """n samples, a row each."""

    refs: Ints  # [n, 3] Source, shard, row
    position: Ints  # [n] Position in the source's endless stream of epochs
    tokens: Ints  # [n] Length; after a mode's rules were applied: the length that is delivered
    vision: Ints  # [n] Vision tokens
    vit: Ints  # [n] Cost in the vision tower, in whole numbers
    decode: Ints  # [n] Cost of decoding videos; 0 where it is not known
    labels: Ints  # [n] Tokens that are learned; -1: unknown, or changed by the mode's rules
    age: Ints  # [n] Windows through which the sample was carried

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, rows: npt.NDArray[np.generic]) -> Samples:
        return Samples(**{name: getattr(self, name)[rows] for name in _COLUMNS})

    @staticmethod
    def none() -> Samples:
        zeros = np.zeros(0, dtype=np.int64)
        return Samples(**{name: zeros.reshape(0, 3) if name == "refs" else zeros for name in _COLUMNS})


_COLUMNS = tuple(field.name for field in fields(Samples))


def concatenate(parts: Sequence[Samples]) -> Samples:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Samples.none()
    return Samples(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS})


@dataclass(slots=True, eq=False)
class _Uncounted:
    """Samples that were read together, as long as few of them were asked for."""

    rows: Ints  # [n] Where their columns belong
    columns: Countable
    is_left: npt.NDArray[np.bool_]  # [n] Whether a sample was not counted yet


class ColumnCache:
    """Columns of the samples of some shards, read when a shard is first touched, and then kept."""

    def __init__(self, shards: Ints, sizes: Ints) -> None:
        """Prepare for [k] shards with so many samples each; nothing is read yet."""
        self.shards = shards
        self.splits = np.concatenate([[0], np.cumsum(sizes)])  # [k + 1]
        self._is_read = np.zeros(len(shards), dtype=bool)
        self._uncounted: list[_Uncounted] = []
        # Uninitialised on purpose: pages of shards that are never read cost no memory.
        total = int(self.splits[-1])
        self.tokens = np.empty(total, dtype=np.int32)
        self.vision = np.empty(total, dtype=np.int32)
        self.vit = np.empty(total, dtype=np.int64)
        self.decode = np.empty(total, dtype=np.int64)
        self.labels = np.empty(total, dtype=np.int32)

    def load(self, slots: Ints, rows: Ints, read: Callable[[Ints], Countable], costs: CostConfig) -> None:
        """Have the columns of some rows, which are of the shards in some slots.

        A first window touches most shards of its group and asks for few of their samples. Only these are counted, so
        that the first batch does not wait for the others.
        """
        touched = np.zeros(len(self.shards), dtype=bool)
        touched[slots] = True
        for missing in self._portions(np.flatnonzero(touched & ~self._is_read)):
            mine, _ = take_rows(self.splits, missing)
            self._uncounted.append(_Uncounted(mine, read(self.shards[missing]), np.ones(len(mine), dtype=bool)))
            self._is_read[missing] = True
        if not self._uncounted:
            return
        is_asked = np.zeros(len(self.tokens), dtype=bool)
        is_asked[rows] = True
        for portion in self._uncounted:
            asked = portion.is_left & is_asked[portion.rows]
            if (portion.is_left & ~asked).sum() <= _COUNT_ALL * len(asked):
                asked = portion.is_left
            self._count(portion, np.flatnonzero(asked), costs)
            portion.is_left = portion.is_left & ~asked
        self._uncounted = [portion for portion in self._uncounted if portion.is_left.any()]

    def _count(self, portion: _Uncounted, picked: Ints, costs: CostConfig) -> None:
        if not len(picked):
            return
        counted, rows = portion.columns.pick(picked), portion.rows[picked]
        self.tokens[rows] = counted.tokens
        self.vision[rows] = counted.vision_tokens
        self.vit[rows] = vit_cost(counted.vision_patches, counted.vision_squares, costs)
        self.decode[rows] = 0 if counted.decode is None else counted.decode
        self.labels[rows] = counted.labels

    def _portions(self, slots: Ints) -> Iterator[Ints]:
        """Cut slots into portions whose indexes fit into some tens of megabytes."""
        portion = np.cumsum(self.splits[slots + 1] - self.splits[slots]) // _SAMPLES_AT_ONCE
        yield from (slots[portion == number] for number in sorted(set(portion.tolist())))


def _read_shards(read: ColumnReader, number: int, spec: SourceSpec, shards: Sequence[int]) -> Countable:
    columns = read(number, shards)
    expected = sum(map(spec.samples_per_shard.__getitem__, shards))
    if len(columns) != expected:
        which = (
            f"index of shard {shards[0]}" if len(shards) == 1 else f"indexes of shards {', '.join(map(str, shards))}"
        )
        raise DatasetError(
            f"The {which} of source '{spec.name}' has {len(columns)} samples, the manifest says {expected}; "
            f"every position after it would be wrong. Index the shard again or restore its manifest."
        )
    return columns


class _ShardGroup(NamedTuple):
    """One live group of shards."""

    shards: Ints  # [k]
    splits: Ints  # [k + 1] Rows of the shards, one after the other
    entries: npt.NDArray[np.int32]  # [delivered] Such rows, in the order of the epoch
    columns: ColumnCache


class SourceStream:
    """One source as an endless row of epochs, open at any position."""

    def __init__(self, number: int, spec: SourceSpec, read: ColumnReader, config: PlanConfig) -> None:
        self.number = number
        self.spec = spec
        self.epoch_length = epoch_length(spec)
        self._read = read
        self._key = Key(seed=config.seed, purpose="", source=spec.name)
        self._order = config.order
        self._shuffle = config.shuffle
        self._costs = config.balance.costs
        self._layouts: dict[int, EpochLayout] = {}
        self._groups: dict[tuple[int, int], _ShardGroup] = {}
        # a small source meets the same shards in every epoch, and many epochs in one window.
        one_group = len(spec.samples_per_shard) <= config.order.group_shards
        self._kept: ColumnCache | None = None
        if one_group and spec.num_samples <= _SMALL_SOURCE:
            sizes = np.asarray(spec.samples_per_shard, dtype=np.int64)
            self._kept = ColumnCache(np.arange(len(sizes)), sizes)

    def take(self, positions: Ints) -> Samples:
        """Return the samples at ascending positions, whatever epochs and groups they lie in."""
        parts = []
        begin = 0
        while begin < len(positions):
            epoch, offset = divmod(int(positions[begin]), self.epoch_length)
            layout = self._layout(epoch)
            number = layout.group_at(offset)
            first, last = (epoch * self.epoch_length + int(layout.group_begins[number + k]) for k in (0, 1))
            end = int(np.searchsorted(positions, last))
            parts.append(self._samples(self._group(epoch, number, layout), positions[begin:end], first))
            begin = end
        return concatenate(parts)

    def groups(self, position: int, num_epochs: float) -> Iterator[tuple[int, int, Ints]]:
        """Yield begin, end and shards of the groups from a position on, to the end of so many epochs."""
        epoch, offset = divmod(position, max(self.epoch_length, 1))
        while epoch < num_epochs and self.epoch_length:
            layout = self.layout(epoch)
            begins = layout.group_begins + epoch * self.epoch_length
            for number in range(layout.group_at(offset), len(begins) - 1):
                k = self._order.group_shards
                yield int(begins[number]), int(begins[number + 1]), layout.shards[number * k : (number + 1) * k]
            epoch, offset = epoch + 1, 0

    def layout(self, epoch: int) -> EpochLayout:
        """Return one epoch, shard by shard."""
        return epoch_layout(self.spec, replace(self._key, epoch=epoch), self._order, shuffle=self._shuffle)

    def _samples(self, group: _ShardGroup, positions: Ints, first: int) -> Samples:
        """Return samples of one group that begins at position `first`."""
        rows = group.entries[positions - first]
        slots = np.searchsorted(group.splits, rows, side="right") - 1
        refs = np.empty((len(rows), 3), dtype=np.int64)
        refs[:, 0] = self.number
        refs[:, 1] = group.shards[slots]
        refs[:, 2] = rows - group.splits[slots]
        columns = group.columns
        if columns is self._kept:  # which has all shards in the order of their numbers
            slots = refs[:, 1]
        at = columns.splits[slots] + refs[:, 2]
        columns.load(slots, at, self._read_shards, self._costs)
        return Samples(
            refs=refs,
            position=positions,
            tokens=columns.tokens[at].astype(np.int64),
            vision=columns.vision[at].astype(np.int64),
            vit=columns.vit[at],
            decode=columns.decode[at],
            labels=columns.labels[at].astype(np.int64),
            age=np.zeros(len(rows), dtype=np.int64),
        )

    def _read_shards(self, shards: Ints) -> Countable:
        return _read_shards(self._read, self.number, self.spec, shards.tolist())

    def _layout(self, epoch: int) -> EpochLayout:
        if epoch not in self._layouts:
            _forget_all_but_newest(self._layouts)
            self._layouts[epoch] = self.layout(epoch)
        return self._layouts[epoch]

    def _group(self, epoch: int, number: int, layout: EpochLayout) -> _ShardGroup:
        if (epoch, number) not in self._groups:
            _forget_all_but_newest(self._groups)
            k = self._order.group_shards
            shards = layout.shards[number * k : (number + 1) * k]
            sizes = np.asarray([self.spec.samples_per_shard[s] for s in shards.tolist()], dtype=np.int64)
            entries = group_entries(
                sizes,
                layout.quotas[number * k : (number + 1) * k],
                shards,
                replace(self._key, epoch=epoch, index=number),
                self._order.run_length if self._shuffle else None,
            )
            columns = self._kept or ColumnCache(shards, sizes)
            splits = np.concatenate([[0], np.cumsum(sizes)])
            self._groups[epoch, number] = _ShardGroup(shards, splits, entries, columns)
        return self._groups[epoch, number]


def _forget_all_but_newest(cache: dict[Any, Any]) -> None:
    for old in list(cache)[:-1]:
        del cache[old]
