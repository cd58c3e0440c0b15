"""The samples of one source at given positions, with what the plan must know of each.

Enters: an order and a `ColumnReader`. Leaves: `Samples`, arrays with a row per sample. Columns are kept for the live
group of shards, two groups at most (a window may straddle their border): about 24 bytes a sample with its place in
the permutation. Nothing else grows with the dataset but the layout of the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vlm_stream.errors import DatasetError
from vlm_stream.plan.costs import vit_cost
from vlm_stream.plan.order import EpochLayout, epoch_layout, epoch_length, group_entries
from vlm_stream.plan.randomness import Key
from vlm_stream.ragged import take_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from vlm_stream.plan.config import CostConfig, PlanConfig
    from vlm_stream.plan.values import ColumnReader, SampleColumns, SourceSpec

    Ints = npt.NDArray[np.int64]

__all__ = ["Samples", "SourceStream", "concatenate"]

_SMALL_SOURCE = 1 << 18  # samples whose columns are kept for good
_SAMPLES_AT_ONCE = 1 << 18  # that a reader is asked for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """n samples, a row each."""

    refs: Ints
    """[n, 3] Source, shard, row."""
    position: Ints
    """[n] Position in the source's endless stream of epochs."""
    tokens: Ints
    """[n] Length; after a mode's rules were applied: the length that is delivered."""
    vision: Ints
    """[n] Vision tokens."""
    vit: Ints
    """[n] Cost in the vision tower, in whole numbers."""
    labels: Ints
    """[n] Tokens that are learned; -1: unknown, or changed by the mode's rules."""
    age: Ints
    """[n] Windows through which the sample was carried."""

    def __len__(self) -> int:
        """Return n."""
        return len(self.tokens)

    def pick(self, rows: npt.NDArray[np.generic]) -> Samples:
        """Return some of the samples, in the order of `rows`."""
        return Samples(**{name: getattr(self, name)[rows] for name in _COLUMNS})

    @staticmethod
    def none() -> Samples:
        """Return no samples."""
        zeros = np.zeros(0, dtype=np.int64)
        return Samples(**{name: zeros.reshape(0, 3) if name == "refs" else zeros for name in _COLUMNS})


_COLUMNS = tuple(field.name for field in fields(Samples))


def concatenate(parts: Sequence[Samples]) -> Samples:
    """Join samples end to end."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Samples.none()
    return Samples(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS})


class ColumnCache:
    """Columns of the samples of some shards, read when a shard is first touched, and then kept."""

    def __init__(self, shards: Ints, sizes: Ints) -> None:
        """Prepare for [k] shards with so many samples each; nothing is read yet."""
        self.shards = shards
        self.splits = np.concatenate([[0], np.cumsum(sizes)])  # [k + 1]
        self._is_read = np.zeros(len(shards), dtype=bool)
        # Uninitialised on purpose: pages of shards that are never read cost no memory.
        total = int(self.splits[-1])
        self.tokens = np.empty(total, dtype=np.int32)
        self.vision = np.empty(total, dtype=np.int32)
        self.vit = np.empty(total, dtype=np.int64)
        self.labels = np.empty(total, dtype=np.int32)

    def load(self, slots: Ints, number: int, spec: SourceSpec, read: ColumnReader, costs: CostConfig) -> None:
        """Read those of the shards in some slots that were not read yet."""
        touched = np.zeros(len(self.shards), dtype=bool)
        touched[slots] = True
        for missing in self._portions(np.flatnonzero(touched & ~self._is_read)):
            columns = _read_shards(read, number, spec, self.shards[missing].tolist())
            rows, _ = take_rows(self.splits, missing)
            self.tokens[rows] = columns.tokens
            self.vision[rows] = columns.vision_tokens
            self.vit[rows] = vit_cost(columns.vision_patches, columns.vision_squares, costs)
            self.labels[rows] = columns.labels
            self._is_read[missing] = True

    def _portions(self, slots: Ints) -> Iterator[Ints]:
        """Cut slots into portions whose indexes fit into some tens of megabytes."""
        portion = np.cumsum(self.splits[slots + 1] - self.splits[slots]) // _SAMPLES_AT_ONCE
        yield from (slots[portion == number] for number in sorted(set(portion.tolist())))


def _read_shards(read: ColumnReader, number: int, spec: SourceSpec, shards: Sequence[int]) -> SampleColumns:
    columns = read(number, shards)
    expected = sum(map(spec.samples_per_shard.__getitem__, shards))
    if len(columns.tokens) != expected:
        which = (
            f"index of shard {shards[0]}" if len(shards) == 1 else f"indexes of shards {', '.join(map(str, shards))}"
        )
        raise DatasetError(
            f"The {which} of source '{spec.name}' has {len(columns.tokens)} samples, the manifest says {expected}; "
            f"every position behind it would be wrong. Index the shard again or restore its manifest."
        )
    return columns


class _ShardGroup(NamedTuple):
    """One live group of shards."""

    shards: Ints
    """[k]"""
    splits: Ints
    """[k + 1] Rows of the shards, one after the other."""
    entries: npt.NDArray[np.int32]
    """[delivered] Such rows, in the order of the epoch."""
    columns: ColumnCache


class SourceStream:
    """One source as an endless row of epochs, open at any position."""

    def __init__(self, number: int, spec: SourceSpec, read: ColumnReader, config: PlanConfig) -> None:
        """Prepare; nothing is read and nothing laid out yet."""
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
        # A small source meets the same shards in every epoch, and many epochs in one window.
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
        columns.load(slots, self.number, self.spec, self._read, self._costs)
        at = columns.splits[slots] + refs[:, 2]
        return Samples(
            refs=refs,
            position=positions,
            tokens=columns.tokens[at].astype(np.int64),
            vision=columns.vision[at].astype(np.int64),
            vit=columns.vit[at],
            labels=columns.labels[at].astype(np.int64),
            age=np.zeros(len(rows), dtype=np.int64),
        )

    def _layout(self, epoch: int) -> EpochLayout:
        if epoch not in self._layouts:
            _forget_all_but_newest(self._layouts)
            self._layouts[epoch] = epoch_layout(
                self.spec, replace(self._key, epoch=epoch), self._order, shuffle=self._shuffle
            )
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
