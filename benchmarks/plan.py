"""Figures of the plan: fill, speed, balance, start, order quality, state size.

    python benchmarks/plan.py [fill] [speed] [balance] [start] [order] [state]

Synthetic mixtures after published means (FineVision, OBELICS, Cauldron, LLaVA-Video): 14 % text only (lognormal, median
450 tokens, sigma 0.9), 50 % one natural image (long side 640 px, 0.25; text 180, 0.8), 22 % one document image
(1,400 px, 0.45; text 250, 1.0), 8 % two to six images (text 250, 0.8), 6 % video (30 s, 0.9, at 2 fps; text 200, 0.8).
Images are 4:3, 28 pixels to a token, 4 patches to a token, at most 2,560 tokens each; videos have 96 tokens to a pair
of frames, at most 64 pairs. Samples above the capacity are dropped. The other sets of lengths are hard on purpose.
Times are CPU seconds of one process, so that a busy machine does not count.
"""

from __future__ import annotations

import heapq
import itertools
import json
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.plan import (
    BalanceConfig,
    MixtureConfig,
    OrderConfig,
    PackConfig,
    PlainConfig,
    PlanConfig,
    Planner,
    SampleColumns,
    SourceSpec,
    StepShape,
    best_fit_decreasing,
    plan_report,
)
from vlm_stream.plan.units import packs_lower_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlm_stream.plan import PlannedSample


Columns = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, vision tokens, sum of squared patches
CAPACITY = 8192


def lognormal(rng: np.random.Generator, median: float, sigma: float, n: int) -> np.ndarray:
    """Draw from a lognormal distribution given by its median."""
    return rng.lognormal(np.log(median), sigma, n)


def image_tokens(rng: np.random.Generator, side: float, sigma: float, n: int) -> np.ndarray:
    """Draw tokens of images with that median long side."""
    long_side = lognormal(rng, side, sigma, n)
    return np.clip(long_side * long_side * 0.75 / 784, 16, 2560).astype(np.int64)


def mixed(rng: np.random.Generator, n: int, kind: np.ndarray | None = None) -> Columns:
    """Draw the mixed set: text, natural image, document, several images, video."""
    kind = rng.choice(5, n, p=[0.14, 0.50, 0.22, 0.08, 0.06]) if kind is None else kind
    text = np.zeros(n)
    for k, (median, sigma) in enumerate([(450, 0.9), (180, 0.8), (250, 1.0), (250, 0.8), (200, 0.8)]):
        text = np.where(kind == k, lognormal(rng, median, sigma, n), text)
    natural, document = image_tokens(rng, 640, 0.25, n), image_tokens(rng, 1400, 0.45, n)
    images = rng.integers(2, 7, n)
    pairs = np.clip(lognormal(rng, 30, 0.9, n), 2, 64).astype(np.int64)
    zero, one = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    single = np.choose(kind, [zero, natural, document, natural, zero + 96])
    count = np.choose(kind, [zero, one, one, images, pairs])
    return text.astype(np.int64) + 20 + single * count, single * count, count * (single * 4.0) ** 2


def text_only(lengths: Callable[[np.random.Generator, int], np.ndarray]) -> Callable[..., Columns]:
    """Make a set of lengths without media."""

    def make(rng: np.random.Generator, n: int) -> Columns:
        return lengths(rng, n).astype(np.int64), np.zeros(n, dtype=np.int64), np.zeros(n)

    return make


def bimodal(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw short and long samples that leave gaps beside each other."""
    return np.where(rng.random(n) < 0.5, rng.integers(100, 300, n), rng.integers(5000, 6000, n))


def one_giant(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw short samples and one of the full capacity in about every window."""
    lengths = np.clip(lognormal(rng, 300, 0.8, n), 1, 4000)
    lengths[rng.integers(0, n)] = CAPACITY if rng.random() < 0.25 else 300
    return lengths


def one_modality_per_shard(rng: np.random.Generator, n: int) -> Columns:
    """Draw shards of a single kind each."""
    return mixed(rng, n, np.full(n, rng.integers(0, 5)))


SETS: dict[str, Callable[..., Columns]] = {
    "mixed": mixed,
    "uniform(4000,7500)": text_only(lambda rng, n: rng.integers(4000, 7501, n)),
    "bimodal": text_only(bimodal),
    "one giant per window": text_only(one_giant),
    "all zero": text_only(lambda _, n: np.zeros(n)),
    "all text": text_only(lambda rng, n: np.clip(lognormal(rng, 450, 0.9, n), 1, CAPACITY)),
    "one modality per shard": one_modality_per_shard,
}


class Reader:
    """Columns of (source, shard); `distinct` shards are made and repeated, so that reading costs next to nothing."""

    def __init__(self, make: Callable[..., Columns], size: int, distinct: int) -> None:
        """Make the shards."""
        self.num_read = 0
        self.shards = [self.columns(make, size, number) for number in range(distinct)]

    def columns(self, make: Callable[..., Columns], size: int, number: int) -> SampleColumns:
        """Make one shard."""
        tokens, vision, squares = make(np.random.default_rng([7, number]), size)
        return SampleColumns(
            tokens=tokens,
            vision_tokens=vision,
            vision_patches=vision * 4,
            vision_squares=squares,
            labels=np.full(len(tokens), -1),
        )

    def __call__(self, source: int, shards: Sequence[int]) -> SampleColumns:
        """Return shards one after the other."""
        self.num_read += len(shards)
        parts = [self.shards[(source * 17 + shard) % len(self.shards)] for shard in shards]
        names = [field.name for field in fields(SampleColumns)]
        return SampleColumns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def planner(name: str, shards: int, size: int, *, sources: int = 1, **config: Any) -> Planner:
    """Make a planner over a synthetic set."""
    specs = [
        SourceSpec(name=f"set-{k}", samples_per_shard=(size,) * shards, digest="synthetic", weight=1.0 + k)
        for k in range(sources)
    ]
    config = {"mode": PackConfig(pack_size=CAPACITY), "mixture": MixtureConfig(stop="first"), **config}
    return Planner(specs, Reader(SETS[name], size, min(shards, 50)), PlanConfig(**config))


def count_requests(samples: Sequence[PlannedSample]) -> tuple[int, int]:
    """Count requests by the readers' rule, for samples of 100 KB each in shards in an S3 bucket."""
    refs = [sample.ref for sample in samples]
    from vlm_stream.storage.coalesce import plan_requests

    from vlm_stream.storage import ReadOptions, Span

    spans = [Span("s3://bucket", f"{ref.source}/{ref.shard}.tar", ref.row * 100_000, 100_000, None, ()) for ref in refs]
    requests = plan_requests(spans, ReadOptions())
    return len(requests), sum(request.size for request in requests)


def table(title: str, head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print a table."""
    print(f"\n{title}")
    cells = [tuple(f"{c:.5g}" if isinstance(c, float) else str(c) for c in row) for row in [head, *rows]]
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  " + "  ".join(c.ljust(w) for c, w in zip(row, width, strict=True)))


def first_fit(lengths: np.ndarray, capacity: int) -> int:
    """Count the packs of first-fit decreasing."""
    room, count = np.zeros(len(lengths), dtype=np.int64), 0
    for length in np.sort(lengths)[::-1].tolist():
        at = int(np.argmax(room[:count] >= length)) if count else 0
        if count and room[at] >= length:
            room[at] -= length
        else:
            room[count] = capacity - length
            count += 1
    return count


def worst_fit(lengths: np.ndarray, capacity: int) -> int:
    """Count the packs of worst-fit decreasing, the usual greedy knapsack."""
    heap: list[int] = []
    for length in np.sort(lengths)[::-1].tolist():
        if heap and heap[0] + length <= capacity:
            heapq.heapreplace(heap, heap[0] + length)
        else:
            heapq.heappush(heap, length)
    return len(heap)


def fill() -> None:
    """1. Fill at capacity 8,192, windows of 4,096, against first-fit and worst-fit on the same windows."""
    rows = []
    for name in SETS:
        order = OrderConfig(group_shards=25)
        packed = list(planner(name, 50, 1000, order=order).windows())
        drawn = planner(name, 50, 1000, order=order, mode=PlainConfig(max_tokens=CAPACITY)).windows()
        flushed = [np.maximum(window.samples.tokens, 1) for window in drawn]
        num_packs = sum(window.num_units for window in packed)
        tokens = sum(int(window.tokens.sum()) for window in packed)
        bound = packs_lower_bound(np.concatenate(flushed), CAPACITY)
        others = [sum(f(lengths, CAPACITY) for lengths in flushed) for f in (first_fit, worst_fit)]
        over = 100 * (num_packs / bound - 1)
        rows.append((name, 100 * tokens / num_packs / CAPACITY, num_packs, bound, over, *others))
    table("1. Fill, W=4096", ("set", "fill %", "packs", "L2", "over L2 %", "first-fit", "worst-fit"), rows)


def speed() -> None:
    """2. Samples a second: packing alone, and the whole way from positions to units."""
    rows = []
    tokens = np.clip(mixed(np.random.default_rng(0), 1_000_000)[0], 1, CAPACITY)
    for window in (4096, 100_000):
        begin = time.process_time()
        for at in range(0, len(tokens), window):
            best_fit_decreasing(tokens[at : at + window], CAPACITY)
        pack_seconds = time.process_time() - begin
        stream = planner("mixed", 1000, 1000, window=window).windows()
        next(stream)  # reads the columns of the group
        begin = time.process_time()
        num = sum(len(w.samples) for w in itertools.islice(stream, max(400_000 // window, 2)))
        rows.append((window, 1.0 / pack_seconds, num / (time.process_time() - begin) / 1e6))
    table("2. Speed, M samples/s on one core, no compiled code", ("window", "packing", "positions -> units"), rows)


def balance() -> None:
    """3. Largest over mean load of 64 ranks."""
    rows = []
    for barrier, micro, num_steps in [("step", 4, 1), ("step", 1, 8), ("micro", 8, 1), ("none", 4, 1), ("none", 8, 1)]:
        config = BalanceConfig(barrier=barrier, horizon=num_steps)
        plan = planner("mixed", 100, 1000, order=OrderConfig(group_shards=50), balance=config)
        shape = StepShape(world_size=64, micro_batches=micro)
        horizons: list[Any] = []
        list(plan.search(shape, None, lambda _, horizon, found=horizons: bool(found.append(horizon))))
        seconds, ratio = 0.0, []
        for horizon in horizons[:-1]:
            begin = time.process_time()
            grid = horizon.assign()
            seconds += time.process_time() - begin
            for step in grid:
                llm, vit = horizon.table.llm[step].sum(-1), horizon.table.vit[step].sum(-1)  # [micro, rank]
                loads = [load.sum(0) for load in (llm, vit, llm + vit)]
                passes = (llm + vit).max(1).sum() / (llm + vit).mean(1).sum()
                ratio.append([*(load.max() / load.mean() for load in loads), passes])
        rows.append((barrier, micro, num_steps, *np.mean(ratio, axis=0).tolist(), 1000 * seconds / len(ratio)))
    head = ("barrier", "M", "horizon", "LLM/step", "ViT/step", "total/step", "total/micro-step", "ms/step")
    table("3. Balance at DP 64, max/mean", head, rows)


def start() -> None:
    """4. The first step of a billion samples: at the start, at 1 % and 99 % of the epoch, each in its own process."""
    rows = []
    for share in (0.0, 0.01, 0.99):
        out = subprocess.run(
            [sys.executable, __file__, f"start-at={share}"], capture_output=True, text=True, check=True
        )
        rows.append(tuple(json.loads(out.stdout)))
    table("4. Start, 100,000 shards of 10,000", ("at", "CPU seconds", "indexes read", "peak MB", "MB before"), rows)


def start_at(share: float) -> None:
    """Open one place of a huge epoch."""
    reader = Reader(mixed, 10_000, 50)
    before = peak_megabytes()
    begin = time.process_time()
    spec = SourceSpec(name="huge", samples_per_shard=(10_000,) * 100_000, digest="synthetic")
    plan = Planner([spec], reader, PlanConfig(mode=PackConfig(pack_size=CAPACITY)))
    shape = StepShape(world_size=64, micro_batches=4)
    state = None
    if share:
        done = int(share * 1e9)
        end = template(plan)
        end["sources"][0][3], end["draw"], end["window"], end["planned"] = (
            done,
            done,
            done // 4096,
            done // 4096,
        )
        state = end
        reader.num_read, begin = 0, time.process_time()
        plan = Planner([spec], reader, plan.config)
    next(plan.steps(shape, state))
    seconds = time.process_time() - begin
    print(json.dumps([f"{100 * share:g} %", seconds, reader.num_read, peak_megabytes(), before]))


def peak_megabytes() -> float:
    """Return the largest resident size of this process (getrusage would count the parent's, inherited by fork)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def template(plan: Planner) -> dict[str, Any]:
    """Return the state of a plan that has not begun."""
    return plan.encode(plan.start())


def order() -> None:
    """5. How well samples are mixed: 1,000 shards of 1,000, batches of 256; runs against requests."""
    rows = []
    for shards, run in ((1, 1), (64, 1), (250, 1), (1000, 1), (250, 4), (250, 16)):
        config = {"mode": PlainConfig(), "order": OrderConfig(group_shards=shards, run_length=run)}
        plan = planner("mixed", 1000, 1000, **config)
        report = plan_report(
            plan, StepShape(world_size=16, batch_size=16), max_steps=300, count_requests=count_requests
        )
        rows.append(
            (shards, run, report.variance_inflation, report.live_shards, report.repeat_rate, report.requests_per_sample)
        )
    head = ("live shards", "run", "variance inflation", "shards in a window", "repeats", "requests/sample")
    table("5. Order, 1,000 shards of 1,000, batch 256", head, rows)


def state() -> None:
    """6. Bytes of a state: three sources, everything carried, a step of another shape left open twice."""
    rows = []
    for name in ("mixed", "uniform(4000,7500)"):
        plan = planner(name, 1000, 10_000, sources=3, epochs=None)
        sizes, saved = [], None
        for world, micro in ((512, 8), (300, 4), (64, 8), (7, 3)):
            shape = StepShape(world_size=world, micro_batches=micro)
            for step in itertools.islice(plan.steps(shape, saved), 3):
                saved = step.state_after(micro // 2)
                sizes.append(len(json.dumps(saved)))
                sizes.append(len(json.dumps(step.state_after())))
            saved = next(plan.steps(shape, saved)).state_after(micro - 2)
        rows.append((name, int(np.median(sizes)), max(sizes)))
    table("6. State, bytes of JSON", ("set", "median", "largest"), rows)


if __name__ == "__main__":
    FIGURES = {"fill": fill, "speed": speed, "balance": balance, "start": start, "order": order, "state": state}
    wanted = sys.argv[1:] or list(FIGURES)
    if wanted[0].startswith("start-at="):
        start_at(float(wanted[0].partition("=")[2]))
    else:
        for figure in wanted:
            FIGURES[figure]()
