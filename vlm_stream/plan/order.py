"""The order of one source: which sample stands at position p of its endless stream of epochs.

Enters: shard sizes, a key with seed, source and epoch. Leaves: the layout of an epoch, and the permutation of one
group of shards. Shards are permuted, taken in groups of K, and a group's samples are permuted as a whole. Only the
layout, two numbers per shard, grows with the dataset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.plan.randomness import Key, permutation

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.plan.config import OrderConfig
    from vlm_stream.plan.values import SourceSpec

    Ints = npt.NDArray[np.int64]

__all__ = ["EpochLayout", "epoch_layout", "epoch_length", "group_entries"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochLayout:
    """One epoch of one source, shard by shard."""

    shards: Ints
    """[s] Shard numbers in the order in which the epoch meets them."""
    quotas: Ints
    """[s] How many samples each of them delivers."""
    group_begins: Ints
    """[groups + 1] Position at which each group of shards begins."""

    def group_at(self, position: int) -> int:
        """Return the group that holds a position of the epoch."""
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
