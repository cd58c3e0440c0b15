"""Tokens in a second: of image samples, with clips beside a trainer, from S3, and on Ray."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.job import Job, Numbers, measure_packs, opening_of
from benchmarks.peers.questions import Prices, Question, Results, Row, check_same, each, rates
from benchmarks.peers.tree import PeakMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.peers.loaders.base import Loader
    from benchmarks.peers.suite import Suite

_PER_SHARD = {"images": 50, "clips": 10}
_SHUFFLED = 16
"""Few, so that not half an epoch is read before its first pack; only loaders that hold what they shuffle ask for it."""
BUSY = 0.8
"""Of what two cores give in a plain loop, what the trainer wants."""


def packs(loader: Loader, job: Job) -> Numbers:
    """Decode, encode and pack for Qwen2.5-VL."""
    import torch

    from benchmarks.peers.work import CAPACITY, build_real_processor, encode_members

    torch.set_num_threads(1)
    build_real_processor()
    given = {name: job[name] for name in ("warm_s", "window_s", "step_s_per_token") if name in job}
    opening = opening_of(job, transform=encode_members, batch_size=4, shuffle=_SHUFFLED)
    with PeakMemory(every_s=1.0) if job.get("watched") else nullcontext() as memory:
        numbers = measure_packs(loader.packs(opening, CAPACITY), **given)
    return numbers | ({"peak": memory.peak} if memory else {})


def plain_loop(_loader: Loader, job: Job) -> Numbers:
    """What there is to reach: the same functions called in a loop over samples in memory, in one process."""
    import torch

    from benchmarks.peers.data import read_raw
    from benchmarks.peers.work import CAPACITY, build_real_processor, encode_members, next_fit

    torch.set_num_threads(1)
    build_real_processor()
    members: Any = ({"__key__": record.key} | record.members() for record in read_raw(Path(job["raw"])))
    samples: dict[str, int] = {}
    begin, cpu = time.perf_counter(), time.process_time()
    for pack in next_fit(map(encode_members, members), CAPACITY):
        samples |= zip(pack["keys"], pack["lengths"], strict=True)
    spent = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
    return {"lengths": samples, "tokens": sum(samples.values()), **spent}


def _written(suite: Suite, mixture: str, num_samples: int) -> tuple[Path, dict[str, Path]]:
    raw = suite.raw(mixture, num_samples)
    return raw, {name: suite.written(name, raw, _PER_SHARD[mixture]) for name in suite.loaders}


def measure_core(suite: Suite) -> Results:
    """1. A window of an epoch of image samples; two workers."""
    raw, folders = _written(suite, "images", suite.scale.images)
    window: dict[str, Any] = {"warm_s": suite.scale.warm_s, "window_s": suite.scale.window_s}
    where = {name: str(folder) for name, folder in folders.items()}
    found = suite.in_turns("throughput.packs", suite.ways(compact=True), where=where.get, workers=2, **window)
    loop = suite.expected(raw)
    check_same(found, loop["lengths"], whole=False)
    return {"runs": found, "loop": loop["tokens"] / loop["cpu"]}


def measure_clips(suite: Suite) -> Results:
    """2. An epoch with clips beside a trainer that sleeps; two workers."""
    raw, folders = _written(suite, "clips", suite.scale.epoch_clips)
    where = {name: str(folder) for name, folder in folders.items()}
    loop = suite.expected(raw)
    step = loop["cpu"] / loop["tokens"] / 2 / BUSY
    ways = suite.ways(compact=True)
    found = suite.in_turns("throughput.packs", ways, where=where.get, workers=2, step_s_per_token=step)
    check_same(found, loop["lengths"], whole=True)
    return {"runs": found, "step": step * 8192, "loop": loop["tokens"] / loop["cpu"]}


def measure_s3(suite: Suite) -> Results:
    """3. Epochs of both mixtures from S3; two workers."""
    found: Results = {}
    for mixture, number in (("images", suite.scale.epoch_images), ("clips", suite.scale.epoch_clips)):
        raw, folders = _written(suite, mixture, number)
        loop = suite.expected(raw)
        with suite.s3(folders) as (environment, proxy):
            runs: dict[str, list[Results]] = {}
            for title, (name, options) in suite.ways(compact=True).items():
                proxy.reset()
                where = f"s3://test-bucket/{name}"
                settings = {"where": where, "workers": 2, "options": options, "environment": environment}
                numbers = suite.job(name, "throughput.packs", **settings)
                runs[title] = [numbers | {"requests": proxy.requests, "sent": proxy.num_bytes}]
        check_same(runs, loop["lengths"], whole=True)
        found[mixture] = runs
    return found


def measure_ray(suite: Suite) -> Results:
    """9. The same window as 1, with builders on a Ray cluster of this machine."""
    raw, folders = _written(suite, "images", suite.scale.images)
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "vlm_stream": ("vlm_stream", {"ray": True}),
        "vlm_stream compact": ("vlm_stream", {"ray": True, "pixels": "compact"}),
        "ray_data": ("ray_data", {}),
    }
    ways = {title: way for title, way in ways.items() if way[0] in suite.loaders}
    where = {name: str(folder) for name, folder in folders.items()}
    window: dict[str, Any] = {"warm_s": suite.scale.warm_s, "window_s": suite.scale.window_s}
    found = suite.in_turns("throughput.packs", ways, where=where.get, workers=2, watched=True, **window)
    check_same(found, suite.expected(raw)["lengths"], whole=False)
    return {"runs": found}


def _speed(run: Numbers) -> float:
    return run["tokens"] / run["seconds"]  # type: ignore[no-any-return]


def _per_core(run: Numbers) -> float:
    return run["tokens"] / run["cpu"]  # type: ignore[no-any-return]


def _core_rows(found: Results, _all: Results, _prices: Prices) -> Iterable[Row]:
    runs = found["runs"]
    yield Row("tokens/s for each busy core", rates(runs, _per_core), "images: tokens/s for each busy core")
    yield Row("tokens/s, 2 workers on 2 cores", rates(runs, _speed))
    yield Row(f"A plain loop over samples in memory, one core: {found['loop']:,.0f} tokens/s", {})


def _clips_rows(found: Results, _all: Results, _prices: Prices) -> Iterable[Row]:
    runs = found["runs"]
    yield Row("tokens/s", rates(runs, _speed))
    waits = rates(runs, lambda run: 100 * run["waited"] / run["seconds"], "{:.0f} %")
    waits = {way: cell.partition(" (")[0] for way, cell in waits.items()}
    yield Row("share of the time for which the trainer waits", waits, "with clips: the trainer waits for")
    yield Row("tokens/s for each busy core", rates(runs, _per_core))
    yield Row(f"A step of the trainer: {found['step']:.2f} s for 8,192 tokens", {})


def _s3_rows(found: Results, _all: Results, _prices: Prices) -> Iterable[Row]:
    for mixture, runs in found.items():
        short = "from S3 with 30 ms: tokens/s" if mixture == "images" else "the same with clips"
        yield Row(f"{mixture}, tokens/s", rates(runs, _speed), short)
        yield Row(f"{mixture}, tokens/s for each busy core", rates(runs, _per_core))
        yield Row(f"{mixture}, requests a sample", each(runs, lambda run: f"{run['requests'] / run['delivered']:.2f}"))
        sent = each(runs, lambda run: f"{run['sent'] / run['all_tokens']:,.0f}")
        yield Row(f"{mixture}, bytes fetched for a token", sent)


def _ray_rows(found: Results, results: Results, _prices: Prices) -> Iterable[Row]:
    runs = found["runs"]
    yield Row("tokens/s, 2 builders on Ray", rates(runs, _speed), "builders on Ray: tokens/s")
    yield Row("tokens/s for each busy core", rates(runs, _per_core))
    yield Row("peak memory of all processes, MB", each(runs, lambda run: f"{run['peak'] / 1e6:,.0f}"))
    local = results.get("core", {}).get("runs", {})
    if {name: local[name] for name in runs if name in local and name != "ray_data"}:
        yield Row("for comparison: local workers, tokens/s (question 1)", rates(local, _speed))


CORE = Question(
    "How many tokens does a core make of image samples?",
    "Decoding and the processor's arithmetic are the same work for all. What differs is around them: here text was "
    "tokenised when the data were converted, pixels are written into memory that the trainer maps and that is used "
    "again, and with compact pixels a worker sends bytes that are finished in the trainer's process. Others pass "
    "tensors from process to process and join them once more; Ray Data passes them through its object store.",
    measure_core,
    _core_rows,
)
CLIPS = Question(
    "What if clips of 5 to 300 s are among the samples?",
    "Here the index says which batches are expensive, so that they are begun early and by whoever is free. Torch's "
    "`DataLoader`, under most of the others, gives samples to workers in turn and waits for each in turn. Where tables "
    "of clips were made at conversion, only the groups of pictures that hold a picked frame are read and decoded.",
    measure_clips,
    _clips_rows,
)
S3 = Question(
    "What if the data are on S3, with 30 ms for each request?",
    "Here each sample of a shuffled epoch is a request of its own, many at a time, and of long clips only what picked "
    "frames need is asked for. MosaicML Streaming and LitData download whole shards before the first sample, "
    "WebDataset starts a command for each shard, Lance asks for rows; what it has asked for before the first pack "
    "counts for nobody, so that its bytes are fewer.",
    measure_s3,
    _s3_rows,
)
RAY = Question(
    "What do builders on Ray give, against Ray Data?",
    "Ray Data moves encoded samples as Arrow blocks through the object store and the trainer packs them; builders here "
    "are actors that return whole packs.",
    measure_ray,
    _ray_rows,
)
