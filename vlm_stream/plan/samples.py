"""The samples of one source at given positions, with what the plan must know of each.

Enters: an order and a `ColumnReader`. Leaves: `Samples`, arrays with a row per sample. The columns of the live group
are kept, two groups at most (a window may straddle their border); a shard is read when a window first touches it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vlm_stream.errors import DatasetError
from vlm_stream.plan.costs import CostConfig, vit_cost
from vlm_stream.plan.order import EpochLayout, epoch_layout, epoch_length, group_entries
from vlm_stream.plan.randomness import Key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.plan.config import PlanConfig
    from vlm_stream.plan.values import ColumnReader, SampleColumns, SourceSpec

    Ints = npt.NDArray[np.int64]

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
        age=np.concatenate([p.age for p in parts]),
    )


class _ShardColumns(NamedTuple):
    """What is kept of one shard: 16 bytes a sample."""

    tokens: npt.NDArray[np.int32]
    vision: npt.NDArray[np.int32]
    vit: Ints


def _shrink(columns: SampleColumns, costs: CostConfig) -> _ShardColumns:
    return _ShardColumns(
        columns.tokens.astype(np.int32),
        columns.vision_tokens.astype(np.int32),
        vit_cost(columns.vision_patches, columns.vision_squares, costs),
    )


class _LiveGroup:
    """One group of shards: its permutation, and the columns of those of its shards that were touched."""

    def __init__(self, shards: Ints, sizes: Ints, entries: npt.NDArray[np.int32]) -> None:
        total = int(sizes.sum())
        self.shards = shards  # [k]
        self.begins = np.concatenate([[0], np.cumsum(sizes)])  # [k + 1] rows of the concatenation
        self.entries = entries  # [delivered] rows of the concatenation
        self.read = np.zeros(len(shards), dtype=bool)
        # Uninitialised on purpose: pages of shards that are never read cost no memory.
        self.tokens = np.empty(total, dtype=np.int32)
        self.vision = np.empty(total, dtype=np.int32)
        self.vit = np.empty(total, dtype=np.int64)

    def put(self, slot: int, columns: _ShardColumns) -> None:
        begin, end = self.begins[slot], self.begins[slot + 1]
        self.tokens[begin:end], self.vision[begin:end], self.vit[begin:end] = columns
        self.read[slot] = True


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
        # A source of one group meets the same shards in every epoch; a small one meets many epochs in one window.
        self._kept: dict[int, _ShardColumns] | None = (
            {} if len(spec.samples_per_shard) <= config.order.group_shards else None
        )

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
        slots = np.searchsorted(group.begins, rows, side="right") - 1
        self._load(group, slots)
        refs = np.empty((len(rows), 3), dtype=np.int64)
        refs[:, 0] = self.number
        refs[:, 1] = group.shards[slots]
        refs[:, 2] = rows - group.begins[slots]
        return Samples(
            refs=refs,
            tokens=group.tokens[rows].astype(np.int64),
            vision=group.vision[rows].astype(np.int64),
            vit=group.vit[rows],
            age=np.zeros(len(rows), dtype=np.int64),
        )

    def _load(self, group: _LiveGroup, slots: Ints) -> None:
        touched = np.zeros(len(group.shards), dtype=bool)
        touched[slots] = True
        missing = np.flatnonzero(touched & ~group.read)
        if not len(missing):
            return
        kept = self._kept if self._kept is not None else {}
        unread = [shard for shard in group.shards[missing].tolist() if shard not in kept]
        _announce(self._read, [(self.number, shard) for shard in unread])
        for slot, shard in zip(missing.tolist(), group.shards[missing].tolist(), strict=True):
            columns = kept.get(shard)
            if columns is None:
                columns = _shrink(read_shard(self._read, self.number, self.spec, shard), self._costs)
            if self._kept is not None:
                self._kept[shard] = columns
            group.put(slot, columns)

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
            self._groups[epoch, number] = _LiveGroup(shards, sizes, entries)
        return self._groups[epoch, number]


def _forget_all_but_newest(cache: dict[Any, Any]) -> None:
    for old in list(cache)[:-1]:
        del cache[old]


def _announce(read: ColumnReader, shards: list[tuple[int, int]]) -> None:
    """Tell a reader that can read ahead which shards come next; the plan itself asks for them one by one."""
    prefetch = getattr(read, "prefetch", None)
    if prefetch is not None:
        prefetch(shards)


def read_shard(read: ColumnReader, number: int, spec: SourceSpec, shard: int) -> SampleColumns:
    """Read the columns of one shard and check that they are as long as the manifest says."""
    columns = read(number, shard)
    expected = spec.samples_per_shard[shard]
    if len(columns.tokens) != expected:
        raise DatasetError(
            f"The index of shard {shard} of source '{spec.name}' has {len(columns.tokens)} samples, the manifest says "
            f"{expected}; every position behind it would be wrong. Index the shard again or restore its manifest."
        )
    return columns


def read_refs(refs: Ints, specs: Sequence[SourceSpec], read: ColumnReader, costs: CostConfig) -> Samples:
    """Look samples up by ref, shard by shard: for the few that a state names."""
    out = Samples.empty(len(refs))
    out.refs[:] = refs
    shards = sorted({(source, shard) for source, shard, _ in refs.tolist()})
    _announce(read, shards)
    for source, shard in shards:
        columns = read_shard(read, source, specs[source], shard)
        here = np.flatnonzero((refs[:, 0] == source) & (refs[:, 1] == shard))
        rows = refs[here, 2]
        out.tokens[here] = columns.tokens[rows]
        out.vision[here] = columns.vision_tokens[rows]
        out.vit[here] = vit_cost(columns.vision_patches[rows], columns.vision_squares[rows], costs)
    return out
