"""Figures of the plan: fill, speed, balance, start, order quality, state size.

    python benchmarks/plan.py [fill speed balance start order state]

Synthetic mixtures after published means (FineVision, OBELICS, Cauldron, LLaVA-Video): 14 % text only (lognormal, median 450
tokens, sigma 0.9), 50 % one natural image (long side 640 px, 0.25; text 180, 0.8), 22 % one document image (1,400 px,
0.45; text 250, 1.0), 8 % two to six images (text 250, 0.8), 6 % video (30 s, 0.9, at 2 fps; text 200, 0.8). Images are
4:3, 28 pixels to a token, 4 patches to a token, at most 2,560 tokens each; videos have 96 tokens to a pair of frames, at
most 64 pairs. Samples above the capacity are dropped. Adversarial sets are described where they are made.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.plan import (
    BalanceConfig,
    GroupConfig,
    MixtureConfig,
    OrderConfig,
    PackConfig,
    PlanConfig,
    Planner,
    SampleColumns,
    SourceSpec,
    StepShape,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, vision tokens, sum of squared patches


def lognormal(rng: np.random.Generator, median: float, sigma: float, n: int) -> np.ndarray:
    return rng.lognormal(np.log(median), sigma, n)


def image_tokens(rng: np.random.Generator, side: float, sigma: float, n: int) -> np.ndarray:
    long_side = lognormal(rng, side, sigma, n)
    return np.clip(long_side * long_side * 0.75 / 784, 16, 2560).astype(np.int64)


def mixed(rng: np.random.Generator, n: int, kind: np.ndarray | None = None) -> Columns:
    """Draw the mixed set: image, text, video."""
    kind = rng.choice(5, n, p=[0.14, 0.50, 0.22, 0.08, 0.06]) if kind is None else kind
    text = np.zeros(n)
    for k, (median, sigma) in enumerate([(450, 0.9), (180, 0.8), (250, 1.0), (250, 0.8), (200, 0.8)]):
        text = np.where(kind == k, lognormal(rng, median, sigma, n), text)
    natural, document = image_tokens(rng, 640, 0.25, n), image_tokens(rng, 1400, 0.45, n)
    images = rng.integers(2, 7, n)
    pairs = np.clip(lognormal(rng, 30, 0.9, n), 2, 64).astype(np.int64)
    vision = np.choose(kind, [np.zeros(n, dtype=np.int64), natural, document, natural * images, pairs * 96])
    single = np.choose(kind, [np.zeros(n, dtype=np.int64), natural, document, natural, np.full(n, 96)])
    count = np.choose(
        kind, [np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64), np.ones(n, dtype=np.int64), images, pairs]
    )
    return text.astype(np.int64) + 20 + vision, vision, count * (single * 4.0) ** 2


def text_only(lengths: Callable[[np.random.Generator, int], np.ndarray]) -> Callable[..., Columns]:
    def make(rng: np.random.Generator, n: int) -> Columns:
        tokens = lengths(rng, n).astype(np.int64)
        return tokens, np.zeros(n, dtype=np.int64), np.zeros(n)

    return make


def one_giant(rng: np.random.Generator, n: int) -> np.ndarray:
    lengths = np.clip(lognormal(rng, 300, 0.8, n), 1, 4000)
    lengths[:: max(n // 2, 1)] = 8192
    return lengths


def one_modality_per_shard(rng: np.random.Generator, n: int) -> Columns:
    return mixed(rng, n, np.full(n, rng.integers(0, 5)))


SETS: dict[str, Callable[..., Columns]] = {
    "mixed": mixed,
    "uniform(4000,7500)": text_only(lambda rng, n: rng.integers(4000, 7501, n)),
    "bimodal": text_only(
        lambda rng, n: np.where(rng.random(n) < 0.5, rng.integers(100, 300, n), rng.integers(5000, 6000, n))
    ),
    "one giant per window": text_only(one_giant),
    "all zero": text_only(lambda rng, n: np.zeros(n)),
    "all text": text_only(lambda rng, n: np.clip(lognormal(rng, 450, 0.9, n), 1, 8192)),
    "one modality per shard": one_modality_per_shard,
}


class Reader:
    """Columns made of (set, source, shard); `base` repeats a few shards so that making them costs nothing."""

    def __init__(self, make: Callable[..., Columns], size: int, distinct: int | None = None) -> None:
        self.make, self.size, self.distinct = make, size, distinct
        self.kept: dict[tuple[int, int], SampleColumns] = {}
        self.num_read = 0

    def __call__(self, source: int, shard: int) -> SampleColumns:
        self.num_read += 1
        at = (source, shard % self.distinct if self.distinct else shard)
        if at not in self.kept:
            rng = np.random.default_rng([7, *at])
            tokens, vision, squares = self.make(rng, self.size)
            size = 20_000 + vision * 150
            self.kept[at] = SampleColumns(
                tokens=tokens,
                vision_tokens=vision,
                vision_patches=vision * 4,
                vision_squares=squares,
                offset=np.cumsum(size) - size,
                num_bytes=size,
            )
        return self.kept[at]


def planner(
    make: Callable[..., Columns],
    shards: int,
    size: int,
    *,
    sources: int = 1,
    distinct: int | None = None,
    **config: Any,
) -> tuple[Planner, Reader]:
    specs = [
        SourceSpec(name=f"set-{k}", samples_per_shard=(size,) * shards, digest="synthetic", weight=1.0 + k)
        for k in range(sources)
    ]
    reader = Reader(make, size, distinct)
    config = {"mode": PackConfig(pack_size=8192), "mixture": MixtureConfig(stop="first"), **config}
    return Planner(specs, reader, PlanConfig(**config)), reader


def table(title: str, rows: list[tuple[Any, ...]], head: tuple[str, ...]) -> None:
    print(f"\n{title}")
    cells = [tuple(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row) for row in [head, *rows]]
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  " + "  ".join(c.ljust(w) for c, w in zip(row, width, strict=True)))


def balance() -> None:
    rows = []
    for name, barrier, micro, horizon in [
        ("step", "step", 4, 1),
        ("step", "step", 1, 8),
        ("micro", "micro", 8, 1),
        ("none", "none", 4, 1),
        ("none", "none", 8, 1),
    ]:
        plan, _ = planner(
            mixed,
            60,
            1000,
            order=OrderConfig(group_shards=250),
            balance=BalanceConfig(barrier=barrier, horizon=horizon),
        )
        ratio: list[list[float]] = [[], [], [], [], []]
        seconds = 0.0
        shape = StepShape(world_size=64, micro_batches=micro)
        for block in blocks(plan, shape):
            if len(block.table) < shape.units_per_step * horizon:
                break
            begin = time.perf_counter()
            grid = block.deal()
            seconds += (time.perf_counter() - begin) / horizon
            for step in grid:
                llm, vit = block.table.llm[step].sum(-1), block.table.vit[step].sum(-1)  # [micro, rank]
                for at, load in enumerate([llm.sum(0), vit.sum(0), (llm + vit).sum(0)]):
                    ratio[at].append(load.max() / load.mean())
                ratio[3].append(np.mean(llm.max(1) / llm.mean(1)))
                ratio[4].append(np.sum((llm + vit).max(1)) / np.sum((llm + vit).mean(1)))
        rows.append((name, micro, horizon, *[float(np.mean(r)) for r in ratio], 1000 * seconds / len(ratio[0])))
    table(
        "3. Balance at DP 64, max/mean",
        rows,
        ("barrier", "M", "horizon", "llm/step", "vit/step", "total/step", "llm/micro", "total/micro", "ms/step"),
    )


if __name__ == "__main__":
    balance()
