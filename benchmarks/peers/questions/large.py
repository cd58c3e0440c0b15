"""A dataset of millions of samples: memory of a node's loader processes, and the time to the first batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.peers.job import Job, Numbers, opening_of
from benchmarks.peers.questions import Prices, Question, Results, Row, each, rates
from benchmarks.peers.tree import PeakMemory, seconds_since_start

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from benchmarks.peers.loaders.base import Loader
    from benchmarks.peers.suite import Suite

_TAKEN = 2.5
"""Times what a worker's buffer holds: buffers that grow with what is taken are then full in both workers."""
_SHUFFLED = 1000


def memory(loader: Loader, job: Job) -> Numbers:
    """Take samples as bytes from two workers, shuffled; watch all processes."""
    if "links" in loader.cannot:
        return {"cannot": loader.cannot["links"]}
    taken = 0
    with PeakMemory() as memory:
        for batch in loader.open(opening_of(job)):
            taken += len(batch)
            if taken >= job["take"]:
                break
    return {"megabytes": memory.peak / 1e6, "samples": taken}


def start(loader: Loader, job: Job) -> Numbers:
    """Take the first batch, shuffled; with a small dataset to be warm by, imports are done before."""
    if "links" in loader.cannot:
        return {"cannot": loader.cannot["links"]}
    if warm := job.get("warm"):
        next(iter(loader.open(opening_of(job | {"where": warm, "shuffle": 0, "workers": 0}))))
    begin = time.perf_counter()
    next(iter(loader.open(opening_of(job))))
    opened = time.perf_counter() - begin
    return {"seconds": opened if warm else seconds_since_start()}


def _folders(suite: Suite) -> dict[str, Path]:
    from benchmarks.peers.loaders import open_loader

    return {name: suite.large(name) for name in suite.loaders if "links" not in open_loader(name).cannot}


def measure_memory(suite: Suite) -> Results:
    """4. Peak memory, all buffers full."""
    where = {name: str(folder) for name, folder in _folders(suite).items()}
    shuffled = suite.scale.shuffled
    settings: dict[str, Any] = {"workers": 2, "shuffle": shuffled, "take": int(shuffled * _TAKEN)}
    found = suite.in_turns("large.memory", suite.ways(), 1, where=lambda name: where.get(name, ""), **settings)
    return {"runs": found, "samples": _samples(suite), "shuffled": shuffled}


def measure_start(suite: Suite) -> Results:
    """5. Seconds to the first batch, nothing of the data in the page cache."""
    folders = _folders(suite)
    small = {name: str(suite.written(name, suite.raw("small", 100), 20)) for name in folders}
    found: Results = {"samples": _samples(suite)}
    for title, warm in (("process", False), ("opening", True)):

        def fresh(name: str) -> str:
            if name not in folders:
                return ""
            suite.drop_cache(folders[name])
            return str(folders[name])

        settings: dict[str, Any] = {"workers": 2, "shuffle": _SHUFFLED}
        if warm:
            settings["warm"] = small.get
        found[title] = suite.in_turns("large.start", suite.ways(), where=fresh, **settings)
    return found


def _samples(suite: Suite) -> int:
    return 2 * suite.scale.shard_samples * suite.scale.copies


def _millions(found: Results) -> str:
    return f"{found['samples'] / 1e6:g}M samples"


def _memory_rows(found: Results, _all: Results, _prices: Prices) -> Iterable[Row]:
    title = f"{_millions(found)}: a rank with 2 workers, MB"
    yield Row(title, each(found["runs"], lambda run: f"{run['megabytes']:,.0f}"), f"memory of {title}")


def _start_rows(found: Results, _all: Results, _prices: Prices) -> Iterable[Row]:
    form = "{:.1f}"
    process = rates(found["process"], lambda run: run["seconds"], form)
    opening = rates(found["opening"], lambda run: run["seconds"], form)
    title = f"{_millions(found)}: first batch"
    yield Row(f"{title}, s from the start of the process", _plain(process), f"{title} after so many s")
    yield Row(f"{title}, s from opening, all modules imported", _plain(opening))


def _plain(cells: dict[str, str]) -> dict[str, str]:
    return {way: cell.partition(" (")[0] for way, cell in cells.items()}


MEMORY = Question(
    "How much memory do a node's loader processes take at millions of samples?",
    "Shuffling is arithmetic on positions here, in MosaicML Streaming and in LitData; the others hold the shuffled "
    "samples' bytes, in each worker. MosaicML Streaming holds the order of the whole epoch. Workers here come "
    "from a server process, which shares less with the trainer than a fork does.",
    measure_memory,
    _memory_rows,
)
START = Question(
    "How long until the first batch, from a cold start?",
    "Here the manifest and the indexes of the shards that the first batches come from are read. A large part of the "
    "first row are imports: workers here are started by a server process that imports torch anew, where others fork.",
    measure_start,
    _start_rows,
)
