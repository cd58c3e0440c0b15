"""Samples that are only lengths: what packing and balance over many ranks are measured on.

Enters: a seed. Leaves: records of a few bytes, `{"tokens": ..., "patches": ...}`, which every loader can write and
read, and the same lengths as columns for a plan. The mixture is the one that `benchmarks/plan.py` draws.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers.data import Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CAPACITY", "NUM_LENGTHS", "SAMPLES_PER_SHARD", "length_records", "make_planner"]

CAPACITY = 8192
NUM_LENGTHS = 51_200
SAMPLES_PER_SHARD = 400


@cache
def _lengths() -> tuple[Any, Any, Any]:
    from benchmarks.plan import mixed

    tokens, vision, squares = mixed(np.random.default_rng(11), NUM_LENGTHS)
    return np.minimum(tokens, CAPACITY), vision, squares


def length_records() -> Iterator[Record]:
    """Yield the records."""
    tokens, vision, _ = _lengths()
    for number in range(NUM_LENGTHS):
        text = json.dumps({"tokens": int(tokens[number]), "patches": int(vision[number]) * 4})
        yield Record(file=Path(), key=f"{number:08d}", text=text.encode(), media=())


def make_planner(**config: Any) -> Any:
    """Return a planner of packs over the same samples in the same shards."""
    from vlm_stream.plan import MixtureConfig, PackConfig, PlanConfig, Planner, SampleColumns, SourceSpec

    tokens, vision, squares = _lengths()

    def columns(_source: int, shards: Sequence[int]) -> SampleColumns:
        part = (np.asarray(shards)[:, None] * SAMPLES_PER_SHARD + np.arange(SAMPLES_PER_SHARD)).ravel()
        return SampleColumns(
            tokens=tokens[part],
            vision_tokens=vision[part],
            vision_patches=vision[part] * 4,
            vision_squares=squares[part],
            labels=np.full(len(part), -1),
        )

    shards = (SAMPLES_PER_SHARD,) * (NUM_LENGTHS // SAMPLES_PER_SHARD)
    spec = SourceSpec(name="lengths", samples_per_shard=shards, digest="lengths")
    mode = PackConfig(pack_size=CAPACITY)
    return Planner([spec], columns, PlanConfig(mode=mode, mixture=MixtureConfig(stop="first"), **config))
