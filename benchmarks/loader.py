"""The loader: what a resume costs, what a window costs, whether memory grows.

    python benchmarks/loader.py [resume] [window] [growth]

Each figure is a ratio or a difference within one run. Data is made on the spot. Starts are in `scale.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlm_stream import StreamLoader, make_shards
from vlm_stream.metrics import resident_bytes
from vlm_stream.plan import Planner
from vlm_stream.testing import build_processor, make_toy_dataset

if TYPE_CHECKING:
    from vlm_stream.stream import VLMStream

LIMITS = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 256 * 28 * 28}}
PACK_SIZE = 2048


def make_data(folder: Path, num_samples: int, samples_per_shard: int, **settings: Any) -> tuple[Any, Any]:
    """Write toy shards; return where they are, and their processor."""
    processor = build_processor("qwen2_5_vl", image=LIMITS, video=LIMITS | {"cap_pixels_per_frame": False})
    processor.save_pretrained(folder / "processor")
    meta = make_toy_dataset(folder / "raw", num_samples=num_samples)
    out = settings.pop("out", folder / "shards")
    make_shards(meta, out, processor=str(folder / "processor"), samples_per_shard=samples_per_shard, **settings)
    return out, processor


def first_batch_seconds(shards: Any, processor: Any, state: dict[str, Any] | None) -> float:
    """Return how long a new loader takes to its first batch."""
    loader = StreamLoader(shards, processor=processor, pack_size=PACK_SIZE)
    if state is not None:
        loader.load_state_dict(state)
    begin = time.perf_counter()
    batches = iter(loader)
    next(batches)
    seconds = time.perf_counter() - begin
    batches.close()
    return seconds


def resume(folder: Path) -> None:
    """Seconds to the first batch at 0 % and 99 % of an epoch, and the size of the state."""
    shards, processor = make_data(folder, 4000, 100)
    loader = StreamLoader(shards, processor=processor, pack_size=PACK_SIZE)
    stream = loader.stream
    states = [step.state_after() for step in _steps(stream)]
    late = {"vlm_stream": json.loads(json.dumps(states[int(len(states) * 0.99)])), "rounds": 0}
    early = {"vlm_stream": json.loads(json.dumps(states[0])), "rounds": 0}
    times: dict[str, list[float]] = {"0 %": [], "resume at the first step": [], "resume at 99 %": []}
    for _ in range(7):
        times["0 %"].append(first_batch_seconds(shards, processor, None))
        times["resume at the first step"].append(first_batch_seconds(shards, processor, early))
        times["resume at 99 %"].append(first_batch_seconds(shards, processor, late))
    base = statistics.median(times["0 %"])
    for name, values in times.items():
        print(f"  first batch, {name:26s} {statistics.median(values):.3f} s   {statistics.median(values) / base:.2f}x")
    print(f"  largest state of {len(states)} steps: {max(len(json.dumps(state)) for state in states)} bytes")


def _steps(stream: VLMStream) -> Any:
    planner = stream.plan().planner
    assert isinstance(planner, Planner)
    return planner.steps(stream.options.shape(1))


def window(folder: Path) -> None:
    """Resident memory of a worker process after 60 batches, with windows of 4,096 and of 100,000."""
    shards, processor = make_data(folder, 4000, 100)
    found = {}
    for size in (4096, 100_000):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found[size] = pool.apply(_resident_after, (shards, processor, size))
        print(f"  window {size:7,}: {found[size] / 1e6:.0f} MB resident")
    print(f"  difference: {(found[100_000] - found[4096]) / 1e6:.0f} MB")


def _resident_after(shards: Any, processor: Any, size: int) -> int:
    import os

    import torch

    torch.set_num_threads(1)
    loader = StreamLoader(shards, processor=processor, pack_size=PACK_SIZE, window=size, epochs=None)
    for number, _ in enumerate(loader):
        if number == 60:
            break
    return resident_bytes([os.getpid()])


def growth(folder: Path) -> None:
    """Resident memory of trainer and workers over 2,000 steps."""
    shards, processor = make_data(folder, 400, 50)
    loader = StreamLoader(shards, processor=processor, mode="plain", batch_size=2, epochs=None, num_workers=2)
    seen: list[float] = []
    for number, _ in enumerate(loader, start=1):
        if number % 200 == 0:
            seen.append(loader.metrics()["resident_megabytes"])
        if number == 2000:
            break
    print("  MB resident every 200 steps: " + " ".join(f"{value:.0f}" for value in seen))
    print(f"  growth after warm-up (step 400 to 2,000): {seen[-1] / seen[1] - 1:+.1%}")


def main() -> None:
    """Run the figures that were named, or all."""
    figures = {"resume": resume, "window": window, "growth": growth}
    for name in sys.argv[1:] or figures:
        print(f"{name}: {figures[name].__doc__}")
        folder = Path(tempfile.mkdtemp(prefix="vlm-stream-bench-"))
        try:
            figures[name](folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
