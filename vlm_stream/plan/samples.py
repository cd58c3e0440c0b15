"""The samples of one source at given positions, with what the plan must know of each.

Enters: an order and a `ColumnReader`. Leaves: `Samples`, arrays with a row per sample. The columns of the live group
are kept, two groups at most (a window may straddle their border).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vlm_stream.plan.live_columns import LiveColumns
from vlm_stream.plan.order import EpochLayout, epoch_layout, epoch_length, group_entries
from vlm_stream.plan.randomness import Key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.plan.config import PlanConfig
    from vlm_stream.plan.costs import CostConfig
    from vlm_stream.plan.values import ColumnReader, SourceSpec

    Ints = npt.NDArray[np.int64]

_SMALL_SOURCE = 1 << 18  # samples; their columns take 5 MB

__all__ = ["Samples", "SourceStream", "concatenate", "read_refs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """n samples, a row each."""

    refs: Ints
    """[n, 3] Source, shard, row."""
    tokens: Ints
    """[n] Length; after a mode's rules were applied: the length that is delivered."""
    vision: Ints
    """[n] Vision tokens."""
    vit: Ints
    """[n] Cost in the vision tower, in whole units."""
    labels: Ints
    """[n] Tokens that are learned; -1: unknown, or changed by the mode's rules."""
    age: Ints
    """[n] Windows through which the sample was carried."""

    def __len__(self) -> int:
        """Return n."""
        return len(self.tokens)

    def pick(self, rows: npt.NDArray[np.generic]) -> Samples:
        """Return some of the samples, in the order of `rows`."""
        return Samples(
            refs=self.refs[rows],
            tokens=self.tokens[rows],
            vision=self.vision[rows],
            vit=self.vit[rows],
            labels=self.labels[rows],
            age=self.age[rows],
        )

    @staticmethod
    def empty(count: int = 0) -> Samples:
        """Return samples that are still to be filled in; none by default."""
        zeros = np.zeros(count, dtype=np.int64)
        return Samples(
            refs=np.zeros((count, 3), dtype=np.int64),
            tokens=zeros,
            vision=zeros.copy(),
            vit=zeros.copy(),
            labels=zeros.copy(),
            age=zeros.copy(),
        )


def concatenate(parts: Sequence[Samples]) -> Samples:
    """Join samples end to end."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Samples.empty()
    return Samples(
        refs=np.concatenate([p.refs for p in parts]),
        tokens=np.concatenate([p.tokens for p in parts]),
        vision=np.concatenate([p.vision for p in parts]),
        vit=np.concatenate([p.vit for p in parts]),
        labels=np.concatenate([p.labels for p in parts]),
        age=np.concatenate([p.age for p in parts]),
    )


class _LiveGroup(NamedTuple):
    """One group of shards."""

    shards: Ints
    """[k]"""
    splits: Ints
    """[k + 1] Rows of the shards, one behind the other."""
    entries: npt.NDArray[np.int32]
    """[delivered] Such rows, in the order of the epoch."""
    columns: LiveColumns


class SourceStream:
    """One source as an endless row of epochs, open at any position."""

    def __init__(self, number: int, spec: SourceSpec, read: ColumnReader, config: PlanConfig) -> None:
        """Prepare; nothing is read and nothing laid out yet."""
        self.number = number
        self.spec = spec
        self.epoch_length = epoch_length(spec)
        self.digest = f"{spec.digest}:{spec.sample_ratio!r}"
        """Changes when any of the source's positions may name another sample."""
        self._read = read
        self._key = Key(seed=config.seed, purpose="", source=spec.name)
        self._order = config.order
        self._shuffle = config.shuffle
        self._costs = config.balance.costs
        self._layouts: dict[int, EpochLayout] = {}
        self._groups: dict[tuple[int, int], _LiveGroup] = {}
        # A small source meets the same shards in every epoch, and many epochs in one window.
        one_group = len(spec.samples_per_shard) <= config.order.group_shards
        self._kept: LiveColumns | None = None
        if one_group and spec.num_samples <= _SMALL_SOURCE:
            sizes = np.asarray(spec.samples_per_shard, dtype=np.int64)
            self._kept = LiveColumns(np.arange(len(sizes)), sizes)

    def take(self, position: int, count: int) -> Samples:
        """Return the samples at `count` positions from `position` on, whatever epochs and groups they lie in."""
        parts = []
        while count > 0:
            epoch, begin = divmod(position, self.epoch_length)
            layout = self._layout(epoch)
            number = layout.group_at(begin)
            end = min(int(layout.group_begins[number + 1]), begin + count)
            group = self._group(epoch, number, layout)
            base = int(layout.group_begins[number])
            parts.append(self._samples(group, group.entries[begin - base : end - base]))
            position += end - begin
            count -= end - begin
        return concatenate(parts)

    def _samples(self, group: _LiveGroup, rows: npt.NDArray[np.int32]) -> Samples:
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

    def _group(self, epoch: int, number: int, layout: EpochLayout) -> _LiveGroup:
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
            columns = self._kept or LiveColumns(shards, sizes)
            splits = np.concatenate([[0], np.cumsum(sizes)])
            self._groups[epoch, number] = _LiveGroup(shards, splits, entries, columns)
        return self._groups[epoch, number]


def _forget_all_but_newest(cache: dict[Any, Any]) -> None:
    for old in list(cache)[:-1]:
        del cache[old]


def read_refs(refs: Ints, specs: Sequence[SourceSpec], read: ColumnReader, costs: CostConfig) -> Samples:
    """Look samples up by ref, shard by shard: for the few that a state names."""
    out = Samples.empty(len(refs))
    out.refs[:] = refs
    for source in sorted(set(refs[:, 0].tolist())):  # not `np.unique`: its first call imports numpy.ma, for 18 ms
        here = np.flatnonzero(refs[:, 0] == source)
        shards = np.asarray(sorted(set(refs[here, 1].tolist())), dtype=np.int64)
        slots = np.searchsorted(shards, refs[here, 1])
        live = LiveColumns(shards, np.asarray([specs[source].samples_per_shard[shard] for shard in shards.tolist()]))
        live.load(slots, source, specs[source], read, costs)
        rows = live.splits[slots] + refs[here, 2]
        for name in ("tokens", "vision", "vit", "labels"):
            getattr(out, name)[here] = getattr(live, name)[rows]
    return out
