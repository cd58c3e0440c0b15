"""Columns of shards while they are live: read when a window first touches a shard, and then kept.

Enters: shards and their sizes, a `ColumnReader`. Leaves: numbers of any of their samples, in arrays. Twenty bytes a
sample; shards that are never touched take none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.errors import DatasetError
from vlm_stream.plan.costs import vit_cost
from vlm_stream.ragged import entries_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from vlm_stream.plan.costs import CostConfig
    from vlm_stream.plan.values import ColumnReader, SampleColumns, SourceSpec

    Ints = npt.NDArray[np.int64]

__all__ = ["LiveColumns", "read_shards"]

_SAMPLES_AT_ONCE = 1 << 18


class LiveColumns:
    """What the plan must know of the samples of some shards, one shard behind the other."""

    def __init__(self, shards: Ints, sizes: Ints) -> None:
        """Prepare for [k] shards with so many samples each; nothing is read yet."""
        self.shards = shards
        self.splits = np.concatenate([[0], np.cumsum(sizes)])  # [k + 1]
        self._read = np.zeros(len(shards), dtype=bool)
        # Uninitialised on purpose: pages of shards that are never read cost no memory.
        total = int(self.splits[-1])
        self.tokens = np.empty(total, dtype=np.int32)
        self.vision = np.empty(total, dtype=np.int32)
        self.vit = np.empty(total, dtype=np.int64)
        self.labels = np.empty(total, dtype=np.int32)

    def load(self, slots: Ints, number: int, spec: SourceSpec, read: ColumnReader, costs: CostConfig) -> None:
        """Read those of the shards at some places that were not read yet."""
        touched = np.zeros(len(self.shards), dtype=bool)
        touched[slots] = True
        for missing in self._portions(np.flatnonzero(touched & ~self._read)):
            columns = read_shards(read, number, spec, self.shards[missing].tolist())
            rows = entries_of(self.splits, missing)
            self.tokens[rows] = columns.tokens
            self.vision[rows] = columns.vision_tokens
            self.vit[rows] = vit_cost(columns.vision_patches, columns.vision_squares, costs)
            self.labels[rows] = columns.labels
            self._read[missing] = True

    def _portions(self, slots: Ints) -> Iterator[Ints]:
        """Cut places into portions whose indexes fit into some tens of megabytes."""
        if not len(slots):
            return
        ends = np.cumsum(self.splits[slots + 1] - self.splits[slots])
        if ends[-1] < _SAMPLES_AT_ONCE:
            yield slots
            return
        portion = ends // _SAMPLES_AT_ONCE
        yield from (slots[portion == number] for number in sorted(set(portion.tolist())))


def read_shards(read: ColumnReader, number: int, spec: SourceSpec, shards: Sequence[int]) -> SampleColumns:
    """Read the columns of shards, one behind the other, and check that they are as long as the manifest says."""
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
