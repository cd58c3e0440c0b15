"""Builders on Ray against local workers: tokens in a second, in turns, and where processor time and page faults go.

    python benchmarks/ray_overhead.py [--seconds 8] [--turns 3] [--pixels compact,full] [--ways workers,ray,store]

Two workers, or two builders on a Ray cluster on this machine, on loopback, decode, encode and pack the same image
samples without end. The trainer finishes compact pixels and does nothing else. `ray`: it reads the memory of builders,
which are on its machine; `store`: as if they were elsewhere, so batches come through Ray's object store.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ray_kills import ADDRESS

WARM_S = 4.0


def usage(builders: list[int]) -> Counter[str]:
    """Return processor seconds and page faults so far of the trainer, the builders, and what Ray starts beside them."""
    import psutil

    found: Counter[str] = Counter()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        name = "builders" if process.pid in builders else "trainer" if process.pid == os.getpid() else "others"
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found[f"{name} faults"] += int(stat[7])
        found[f"{name} user"] += int(stat[11]) / os.sysconf("SC_CLK_TCK")
        found[f"{name} system"] += int(stat[12]) / os.sysconf("SC_CLK_TCK")
    return found


def take(folder: str, way: str, pixels: str, seconds: str) -> None:
    """Be a trainer; print the rate, and what all took for each batch."""
    import torch

    from vlm_stream import RayBuilders, StreamLoader, finish_pixels
    from vlm_stream.dispatch import ray_pool

    torch.set_num_threads(1)
    options: dict[str, Any] = {"num_workers": 2}
    if way != "workers":
        import ray

        if way == "store":
            ray_pool.look_into = lambda *_: None  # type: ignore[assignment]

        ray.init(
            address="local",
            _node_ip_address=ADDRESS,
            num_cpus=2,
            object_store_memory=2 << 30,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=40,
        )
        options = {"builders": RayBuilders(count=2, local=0)}
    more = {"pixels": "compact"} if pixels == "compact" else {}
    loader = StreamLoader(
        f"{folder}/shards", processor=f"{folder}/processor", pack_size=8192, epochs=None, **options, **more
    )
    begin = num_batches = tokens = 0
    pids: list[int] = []
    before = spent = Counter[str]()
    started = now = time.perf_counter()
    for batch in loader:
        batch = finish_pixels(batch) if more else batch
        now = time.perf_counter()
        if not begin and now - started > WARM_S and len(loader.builders()) == 2:
            pool: Any = loader._dispatcher._pool
            pids = loader.worker_pids() or [remote.place.pid for remote in pool._remotes.values()]
            begin, before = now, usage(pids)
        elif begin:
            num_batches, tokens = num_batches + 1, tokens + int((batch["input_ids"] >= 0).sum())
            if now - begin > float(seconds):
                spent = usage(pids)  # before the loop is left, which ends them
                break
    spent.subtract(before)
    each = {name: value / num_batches for name, value in spent.items()}
    print(json.dumps({"rate": tokens / (now - begin), **each}), flush=True)
    os._exit(0)


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--take"]:
        take(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", default="8")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--pixels", default="compact,full")
    parser.add_argument("--ways", default="workers,ray,store")
    parser.add_argument("--data", help="where data stay for another run")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.data or name)
        make_data(folder)
        for pixels in args.pixels.split(","):
            found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways.split(",")}
            for _ in range(args.turns):
                for way, runs in found.items():
                    run = [sys.executable, __file__, "--take", str(folder), way, pixels, args.seconds]
                    printed = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
                    runs.append(json.loads(printed.splitlines()[-1]))
                    print(pixels, way, {key: round(value, 4) for key, value in runs[-1].items()}, flush=True)
            rates = {way: statistics.median(run["rate"] for run in runs) for way, runs in found.items()}
            for way, rate in rates.items():
                print(f"{pixels}, {way}: {rate:,.0f} tokens/s, {rate / rates['workers']:.2f} of workers'")


def make_data(folder: Path) -> None:
    """Write the samples that loaders are compared on, once."""
    if (folder / "shards").exists():
        return
    from benchmarks.peers.data import make_raw
    from vlm_stream import make_shards
    from vlm_stream.testing import build_processor

    build_processor("qwen2_5_vl").save_pretrained(folder / "processor")
    folder.mkdir(exist_ok=True)
    raw = make_raw(folder, "images", 320)
    make_shards(raw, folder / "shards", media_dir=str(folder), processor=str(folder / "processor"))


if __name__ == "__main__":
    main()
