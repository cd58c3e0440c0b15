"""Growth, this package alone: groups of shards, samples of which there are only indexes, workers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.questions import Prices, Question, Results, Row, check_same

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.peers.job import Job, Numbers
    from benchmarks.peers.loaders.base import Loader
    from benchmarks.peers.suite import Suite

_GROUPS = (1, 4, 16)


def indexes(_loader: Loader, job: Job) -> Numbers:
    """Plan the first step of one of 256 ranks over so many samples, and some more steps."""
    from benchmarks.scale import measure_state

    return measure_state(Path(job["where"]))


def split(dataset: Path, out: Path, groups: int) -> list[str]:
    """Write datasets that share the shards of one out among them; return their folders."""
    from vlm_stream.format import ShardList, load_manifest, save_manifest
    from vlm_stream.storage import open_store

    manifest = load_manifest(open_store(str(dataset)))
    folders = [out / f"{groups}-{number}" for number in range(groups)]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        shards = list(manifest.shards)[number::groups]
        for path in (path for shard in shards for path in dataset.glob(f"{shard.name.removesuffix('.tar')}.*")):
            if not (folder / path.name).exists():
                os.link(path, folder / path.name)
        save_manifest(open_store(str(folder)), replace(manifest, shards=ShardList.of(shards)))
    return [str(folder) for folder in folders]


def measure(suite: Suite) -> Results:
    """Windows as in question 1; indexes as in `benchmarks/scale.py`."""
    from benchmarks.scale import SAMPLES, make_dataset

    raw = suite.raw("images", suite.scale.images)
    shards = suite.written("vlm_stream", raw, suite.scale.images // 64)
    window = {"warm_s": suite.scale.warm_s, "window_s": suite.scale.window_s}
    found: Results = {"groups": {}, "workers": {}, "samples": {}}

    def one(where: str, workers: int) -> Results:
        runs = {"vlm_stream": [suite.job("vlm_stream", "throughput.packs", where=where, workers=workers, **window)]}
        check_same(runs, suite.expected(raw)["lengths"], whole=False)
        return runs["vlm_stream"][0]

    for groups in _GROUPS:
        where = json.dumps(split(shards, suite.data / "groups", groups))
        found["groups"][str(groups)] = one(where, 2)
    for workers in suite.scale.workers:
        found["workers"][str(workers)] = one(str(shards), workers)
    for number in suite.scale.grown:
        folder = suite.data / f"indexes-{number}"
        if not folder.exists():
            make_dataset(folder, max(1, number // SAMPLES), min(64, max(1, number // SAMPLES)))
        found["samples"][str(number)] = suite.job("vlm_stream", "growth.indexes", where=str(folder))
    return found


def _rows(found: Results, _all: Results, _prices: Prices) -> Iterable[Row]:
    def speed(run: Numbers) -> str:
        return "fails" if "error" in run else f"{run['tokens'] / run['seconds']:,.0f}"

    for groups, run in found["groups"].items():
        yield Row(f"{groups} dataset{'s' * (groups != '1')} mixed, 2 workers, tokens/s", {"vlm_stream": speed(run)})
    for workers, run in found["workers"].items():
        yield Row(f"{workers} worker{'s' * (workers != '1')} on 2 cores, tokens/s", {"vlm_stream": speed(run)})
    for number, run in found["samples"].items():
        if "error" in run:
            cell = "fails"
        else:
            state = max(run["state bytes, first and largest"])
            cell = f"{run['first step s']:.2f} s, {run['MB above imports']} MB, {state}"
        yield Row(f"{int(number):,} samples: first step, memory, largest state in bytes", {"vlm_stream": cell})


GROWTH = Question(
    "How does this package grow?",
    "Index rows are kept by bytes and read by windows, so that memory does not follow the dataset; a manifest has a "
    "row for each shard. More workers than cores gain nothing but overlap with the trainer's process.",
    measure,
    _rows,
)
