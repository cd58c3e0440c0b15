"""Samples that are only lengths: what packing, balance and resume are measured on.

Enters: a number of samples. Leaves: records of a few bytes, which every loader can write and read, and the same lengths
as columns for a plan. A sample's length is known by its key. The mixture is the one that `benchmarks/plan.py` draws.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers.data import Record
from benchmarks.peers.work import CAPACITY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["costs_of", "length_records", "make_planner", "mean_packs", "sample_of_length", "write_ours"]

SAMPLES_PER_SHARD = 400
_MOST = 51_200


@cache
def _lengths() -> tuple[Any, Any, Any]:
    from benchmarks.plan import mixed

    tokens, vision, squares = mixed(np.random.default_rng(11), _MOST)
    return np.minimum(tokens, CAPACITY), vision, squares


def length_records(number: int) -> Iterator[Record]:
    """Yield so many records."""
    for each in range(number):
        yield Record(file=Path(), key=f"{each:08d}", text=b"{}", media=())


def sample_of_length(members: dict[str, Any]) -> dict[str, Any]:
    """Return a sample as packing wants it."""
    key = str(members["__key__"])
    return {"key": key, "length": int(_lengths()[0][int(key)])}


def costs_of(number: int) -> Any:
    """Return [sample, 2] what samples cost in the language model and in the vision tower, as a plan counts it."""
    from vlm_stream.plan import CostConfig

    costs = CostConfig()
    tokens, vision, squares = (column[:number].astype(np.float64) for column in _lengths())
    llm = tokens * costs.llm_linear + tokens**2 * costs.llm_square
    return np.stack([llm, vision * 4 * costs.vit_linear + squares * costs.vit_square], axis=1)


def mean_packs(number: int, *, packed: bool) -> float:
    """Return how many packs so many samples make: full ones, or by next fit."""
    tokens = _lengths()[0][:number]
    if packed:
        return float(tokens.sum()) / CAPACITY
    count, used = 1, 0
    for length in tokens.tolist():
        count, used = (count + 1, length) if used + length > CAPACITY else (count, used + length)
    return count


def write_ours(out: Path, number: int, samples_per_shard: int) -> None:
    """Write short texts with `make_shards`, and these lengths into the indexes as what was counted."""
    import pyarrow as pa

    from vlm_stream import make_shards
    from vlm_stream.format import (
        ShardList,
        describe_shard,
        index_name,
        load_manifest,
        read_table,
        save_manifest,
        write_table,
    )
    from vlm_stream.storage import open_store

    source = out.with_name(f"{out.name}.jsonl")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    source.write_text("".join(json.dumps({"id": f"{each:08d}", "messages": turns}) + "\n" for each in range(number)))
    part = out.with_name(f"{out.name}-part")
    make_shards(source, part, samples_per_shard=samples_per_shard, shuffle=0)
    store = open_store(str(part))
    manifest, shards, done = load_manifest(store), [], 0
    for shard in manifest.shards:
        file = part / index_name(shard.name)
        table = read_table(file.read_bytes(), file.name)
        keys = [int(key) for key in table.column("key").to_pylist()]
        place = table.schema.get_field_index("text_tokens")
        table = table.set_column(place, table.schema.field(place), pa.array(_lengths()[0][keys], pa.int32()))
        file.write_bytes(index := write_table(table))
        shards.append(describe_shard(shard.name, index, num_bytes=shard.totals.bytes, crc32c=shard.crc32c))
        done += len(keys)
    assert done == number
    save_manifest(store, type(manifest)(shards=ShardList.of(shards), fields=manifest.fields))
    part.rename(out)


def make_planner(number: int) -> Any:
    """Return a planner of packs over the same samples in shards of the same size."""
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

    shards = (SAMPLES_PER_SHARD,) * (number // SAMPLES_PER_SHARD)
    spec = SourceSpec(name="lengths", samples_per_shard=shards, digest="lengths")
    mode = PackConfig(pack_size=CAPACITY)
    return Planner([spec], columns, PlanConfig(mode=mode, mixture=MixtureConfig(stop="first")))
