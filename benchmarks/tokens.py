"""Speed of counting: 100,000 index rows per family, and the text of samples one by one and in batches.

python benchmarks/tokens.py
"""

from __future__ import annotations

import time

import numpy as np
from rich.console import Console
from rich.table import Table

from vlm_stream.testing import FAMILIES, build_processor
from vlm_stream.tokens import Geometry, MediaColumns, MediaSizes, TextCounter, count_tokens

NUM_ROWS = 100_000
NUM_TEXTS = 2_000


def make_rows(num_rows: int) -> MediaColumns:
    """Make rows like those of a mixed dataset: 14 % text, 80 % images, 6 % videos."""
    rng = np.random.default_rng(0)
    kind = rng.random(num_rows)
    images = np.where(kind < 0.14, 0, np.where(kind < 0.86, 1, np.where(kind < 0.94, rng.integers(2, 7, num_rows), 0)))
    videos = (kind >= 0.94).astype(np.int64)
    splits = [np.concatenate([[0], np.cumsum(counts)]) for counts in (images, videos, np.zeros_like(videos))]
    num_images, num_videos = int(images.sum()), int(videos.sum())
    longer = np.exp(rng.normal(np.log(800), 0.4, (num_images, 1)))
    sizes = np.maximum(1, longer * rng.uniform(0.5, 1.0, (num_images, 2))).astype(np.int64)
    seconds = np.exp(rng.normal(np.log(30), 0.9, num_videos))
    return MediaColumns(
        text_tokens=np.exp(rng.normal(np.log(200), 0.8, num_rows)).astype(np.int64),
        label_tokens=np.full(num_rows, -1),
        image_splits=splits[0],
        image_sizes=sizes,
        video_splits=splits[1],
        video_sizes=np.stack([(seconds * 25).astype(np.int64), *np.full((2, num_videos), 360)], axis=1),
        video_fps=np.full(num_videos, 25.0),
        video_seconds=seconds,
        video_picked=np.zeros(num_videos, np.int64),
        audio_splits=splits[2],
        audio_sizes=np.zeros((0, 2), np.int64),
    )


def best_of(run: object, times: int = 5) -> float:
    """Return the least CPU time of a few runs, in milliseconds (a busy machine stretches the wall clock)."""
    spans = []
    for _ in range(times):
        begin = time.process_time()
        run()  # type: ignore[operator]
        spans.append(time.process_time() - begin)
    return 1e3 * min(spans)


def main() -> None:
    """Print two tables."""
    rows = make_rows(NUM_ROWS)
    table = Table(
        min_width=90,
        title=f"count_tokens, {NUM_ROWS:,} rows, {len(rows.image_sizes):,} images, {len(rows.video_sizes):,} videos",
    )
    table.add_column("family")
    table.add_column("CPU ms", justify="right")
    for family in FAMILIES:
        geometry = Geometry.from_processor(build_processor(family))
        table.add_row(family, f"{best_of(lambda g=geometry: count_tokens(rows, g)):.1f}")
    Console(width=120).print(table)
    counter = TextCounter(build_processor("qwen2_5_vl"))
    text = "The quick brown fox jumps over the lazy dog, and the chart has three bars. " * 8
    turns = [{"role": role, "content": [{"type": "text", "text": text}]} for role in ("user", "assistant")]
    pairs = [(turns, MediaSizes())] * NUM_TEXTS
    single = best_of(lambda: [counter.count(*pair) for pair in pairs], 2)
    tokens = counter.count(*pairs[0])
    console = Console(width=120)
    console.print(f"text counts ({tokens} tokens each): {1e3 * NUM_TEXTS / single:,.0f} per CPU second")


if __name__ == "__main__":
    main()
