"""Kill a process that fills the node cache, again and again, and look at what it left."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path

from tests.storage.shard_data import read
from tests.waiting import wait_for
from vlm_stream.storage import ReadOptions, SpanReader, open_store


def cache_options(folder, max_bytes: int = 10**9) -> ReadOptions:
    return ReadOptions(cache_dir=str(folder), cache_bytes=max_bytes)


def cached_files(folder, kind: str = "shard") -> list[Path]:
    return sorted(Path(folder).rglob(f"*.{kind}"))


def _read_for_ever(shards, folder, options, started, environment):
    os.environ.update(environment)  # a fork server has that of its start
    with SpanReader(cache_options(folder), store_options=options) as reader:
        started.set()
        while True:
            for tag, result in read(reader, shards.order(os.getpid())):
                shards.assert_equal(tag, result)


def kill_during_fill(shards, folder, options, num_kills: int, seed: int = 0) -> int:
    """Kill a reading process at random moments; after each kill every complete file must be right to the byte.

    Returns:
        How many unfinished downloads the kills left behind: proof that they came in the middle.
    """
    store = open_store(shards.root, options)
    right = {store.get(info.path) for info in store.list()}
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    num_parts_left = 0
    for _ in range(num_kills):
        started = context.Event()
        child = context.Process(target=_read_for_ever, args=(shards, folder, options, started, dict(os.environ)))
        child.start()
        assert started.wait(240)
        wait_for(lambda: cached_files(folder, "part") or len(cached_files(folder)) == len(right))
        time.sleep(rng.random() * 0.3)
        child.kill()
        child.join()
        assert child.exitcode == -9
        num_parts_left += len(cached_files(folder, "part"))
        for path in cached_files(folder):
            blob = path.read_bytes()
            assert any(blob[: len(each)] == each for each in right), path
        for path in cached_files(folder):
            if rng.random() < 0.7:
                path.unlink()  # so that there is always something to fill
    return num_parts_left
