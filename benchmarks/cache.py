"""What the node cache saves: hits and bytes, with what the plans tell and without, on the real order of reads.

Run by hand: `python benchmarks/cache.py`. The plans are real (mixed shards, packs, samples that are left out, two
epochs), and so is the cache with its files, small ones that stand for shards; the store is not: what is counted are
shards that were brought, samples that were read past the cache, and reads of a shard by a batch that found it. One line
for each size of the cache, as a share of the dataset: least recently used; needed last, as the jobs tell; and the least
that any cache can bring, by who knows each single read (Belady). Then the same for two jobs of other seeds, of which
one is twice as fast; their bytes are added up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from typing import NamedTuple

import numpy as np

from vlm_stream.plan import (
    OrderConfig,
    PackConfig,
    PlanConfig,
    Planner,
    SampleColumns,
    SourceSpec,
    StepShape,
    shard_uses,
)
from vlm_stream.storage import Forecast, ShardKey, Uses, cache_folder
from vlm_stream.storage.cache import NodeCache, NoRoomError

SHARDS, SAMPLES, GROUP, PACKS, EPOCHS, WINDOW = 400, 40, 32, 4, 2, 256
BYTES = 1000
ROOM = BYTES + 56
KEYS = [ShardKey("s3://b", f"{number}", BYTES, None) for number in range(SHARDS)]


def columns(_source: int, shards: list[int]) -> SampleColumns:
    """Return lengths of samples: some are too long for a pack."""
    parts = [np.random.default_rng(shard).lognormal(6.3, 0.9, SAMPLES) for shard in shards]
    tokens, zeros = np.concatenate(parts).astype(np.int64), np.zeros(len(shards) * SAMPLES, dtype=np.int64)
    return SampleColumns(
        tokens=tokens, vision_tokens=zeros, vision_patches=zeros, vision_squares=zeros * 1.0, labels=zeros
    )


def planner(seed: int) -> Planner:
    """Return the plan of one source."""
    spec = SourceSpec(name="s", samples_per_shard=(SAMPLES,) * SHARDS, digest="")
    order = OrderConfig(group_shards=GROUP)
    config = PlanConfig(mode=PackConfig(pack_size=4096), order=order, seed=seed, window=WINDOW, epochs=EPOCHS)
    return Planner([spec], columns, config)


class Read(NamedTuple):
    """A batch."""

    job: int
    second: float
    draws: float
    """Before it."""
    shards: Counter[int]
    """How many samples of each."""


def reads(plans: list[Planner]) -> list[Read]:
    """Return the batches of all jobs by time; each job is twice as fast as the one before it."""
    found = []
    for job, plan in enumerate(plans):
        for step in plan.steps(StepShape(batch_size=PACKS)):
            shards = Counter(ref.shard for row in step.refs(0, 0) for ref in row)
            (draws,) = step.positions
            found.append(Read(job, draws / (1000 << job), draws, shards))
    return sorted(found, key=lambda read: read.second)


def run(plans: list[Planner], batches: list[Read], share: float, *, are_told: bool) -> tuple[float, float]:
    """Return the share of reads that were served from the cache, and bytes from the store by bytes of an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        cache = NodeCache(folder, int(share * SHARDS) * ROOM, min_idle_s=0)
        jobs = []
        for plan in plans if are_told else ():
            uses = shard_uses(plan, [0], 1 << 20)
            table = Uses(uses.shards, uses.begins - 2 * WINDOW, uses.ends + 2 * WINDOW)
            jobs.append(Forecast(cache_folder(folder), KEYS, table))
        hits = num_bytes = 0
        for job, _, draws, shards in batches:
            if are_told:
                jobs[job].move(draws, 1000 << job)
            for shard, count in shards.items():
                try:
                    found, downloaded = cache.obtain(KEYS[shard], lambda _descriptor: None, time.sleep)
                    found.close()
                    hits += not downloaded
                    num_bytes += BYTES * downloaded
                except NoRoomError:
                    num_bytes += BYTES // SAMPLES * count
        for told in jobs:
            told.close()
    return hits / sum(len(read.shards) for read in batches), num_bytes / (BYTES * SHARDS)


def belady(batches: list[Read], share: float) -> tuple[float, float]:
    """Return the same of a cache that knows when each shard is read next, and always brings what is read."""
    order = [shard for read in batches for shard in read.shards]
    after, seen = np.empty(len(order)), dict.fromkeys(range(SHARDS), np.inf)
    for place in reversed(range(len(order))):
        after[place], seen[order[place]] = seen[order[place]], place
    held: dict[int, float] = {}
    hits = 0
    for shard, due in zip(order, after, strict=True):
        hits += shard in held
        if shard not in held and len(held) == int(share * SHARDS):
            del held[max(held, key=held.__getitem__)]
        held[shard] = due
    return hits / len(order), (len(order) - hits) / SHARDS


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75])
    shares = parser.parse_args().shares
    for num_jobs in (1, 2):
        plans = [planner(seed) for seed in range(num_jobs)]
        batches = reads(plans)
        print(f"{num_jobs} job(s), {SHARDS} shards, {GROUP} mixed at a time, {EPOCHS} epochs; bytes in epochs")
        print("cache / dataset | hits: least recently used, needed last, best | bytes: the same")
        for share in shares:
            rows = [run(plans, batches, share, are_told=told) for told in (False, True)] + [belady(batches, share)]
            hits, num_bytes = zip(*rows, strict=True)
            print(f"{share:.0%} | {', '.join(f'{each:.2%}' for each in hits)} | ", end="")
            print(", ".join(f"{each:.2f}" for each in num_bytes))


if __name__ == "__main__":
    main()
