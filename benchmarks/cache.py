"""What the node cache saves: hits and bytes, with what the plan tells and without, on the real order of reads.

Run by hand: `python benchmarks/cache.py`. The plan is real (mixed shards, two epochs), and so is the cache with its
files, small ones that stand for shards; the store is not: what is counted are shards that were brought and requests
that were not served. One line for each size of the cache, as a share of the dataset.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.plan import OrderConfig, PlainConfig, PlanConfig, Planner, SourceSpec, shard_uses
from vlm_stream.storage import Forecast, ShardKey, cache_folder, uses_of
from vlm_stream.storage.cache import NodeCache, NoRoomError

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARDS, SAMPLES, GROUP, BATCH, EPOCHS = 400, 40, 32, 64, 2
BYTES = 1000
ROOM = BYTES + 56


def planner() -> Planner:
    """Return the plan of one source."""
    spec = SourceSpec(name="s", samples_per_shard=(SAMPLES,) * SHARDS, digest="")
    config = PlanConfig(
        mode=PlainConfig(), order=OrderConfig(group_shards=GROUP), seed=1, window=1024, epochs=EPOCHS, geometry=""
    )
    return Planner([spec], lambda _source, _shards: None, config)  # type: ignore[arg-type, return-value]


def reads(plan: Planner) -> Iterator[np.ndarray]:
    """Yield the shards of each batch, in the order of the plan."""
    stream = plan.streams[0]
    layouts = [stream.layout(epoch) for epoch in range(EPOCHS)]
    rng = np.random.default_rng(0)
    for layout in layouts:
        for begin in range(0, SHARDS, GROUP):
            group = np.repeat(layout.shards[begin : begin + GROUP], SAMPLES)
            rng.shuffle(group)
            for first in range(0, len(group), BATCH):
                yield np.unique(group[first : first + BATCH])


def run(share: float, *, is_told: bool) -> tuple[float, float]:
    """Return the share of requests that were served from the cache, and bytes from the store by bytes of an epoch."""
    plan = planner()
    with tempfile.TemporaryDirectory() as folder:
        cache = NodeCache(folder, int(share * SHARDS) * ROOM, min_idle_s=0)
        keys = [ShardKey("s3://b", f"{number}", BYTES, None) for number in range(SHARDS)]
        job = None
        if is_told:
            uses = shard_uses(plan, [0], 1 << 20)
            job = Forecast(cache_folder(folder), keys, uses_of(uses.shards, uses.begins, uses.ends))
        hits = num_read = num_bytes = draws = 0
        for batch in reads(plan):
            if job is not None:
                job.move(draws)
            for shard in batch.tolist():
                num_read += 1
                found = cache.find(keys[shard])
                if found is not None:
                    hits += 1
                    found.close()
                    continue
                try:
                    cache.obtain(keys[shard], lambda _descriptor: None, time.sleep)[0].close()
                    num_bytes += BYTES
                except NoRoomError:
                    num_bytes += BYTES // SAMPLES * max(BATCH // len(batch), 1)
            draws += BATCH
        if job is not None:
            job.close()
    return hits / num_read, num_bytes / (BYTES * SHARDS)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75])
    print(f"{SHARDS} shards, {GROUP} mixed at a time, {EPOCHS} epochs; bytes from the store in epochs")
    print("cache / dataset | hits: least recently used, needed last | bytes: least recently used, needed last")
    for share in parser.parse_args().shares:
        (old_hits, old_bytes), (hits, num_bytes) = run(share, is_told=False), run(share, is_told=True)
        print(f"{share:.0%} | {old_hits:.1%}, {hits:.1%} | {old_bytes:.2f}, {num_bytes:.2f}")


if __name__ == "__main__":
    main()
