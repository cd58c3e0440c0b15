"""Does a run grow? Memory, descriptors and mappings of trainer and workers over many batches, as slopes.

    python -m benchmarks.leaks --batches 20000

Small packed batches of toy data, two workers, epochs without end. A slope is that of a straight line through the second
half of the samples, per 1,000 batches; beside it is what was there in the middle and at the end. Private memory is what
the process alone uses (Private_Clean + Private_Dirty of smaps_rollup).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import numpy as np

NAMES = ("private_mb", "descriptors", "mappings")


def look(pid: int) -> tuple[float, float, float] | None:
    """Return private memory in MB, open descriptors and mappings of a process; None: it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
        mappings = len(Path(f"/proc/{pid}/maps").read_text().splitlines())
        return private / 1000, len(list(Path(f"/proc/{pid}/fd").iterdir())), mappings
    except (FileNotFoundError, ProcessLookupError):
        return None


def prepare(folder: Path) -> dict[str, object]:
    """Write toy shards and return the arguments of a loader."""
    from vlm_stream.convert import make_shards
    from vlm_stream.testing import build_processor, make_toy_dataset

    limits = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 4 * 28 * 28}}
    build_processor("qwen2_5_vl", image=limits, video=limits | {"cap_pixels_per_frame": False}).save_pretrained(
        folder / "processor"
    )
    meta = make_toy_dataset(folder / "raw", num_samples=240)
    names = ("captions", "dialogues")
    make_shards(meta, folder / "shards", processor=str(folder / "processor"), samples_per_shard=40, names=names)
    return {"sources": str(folder / "shards"), "processor": str(folder / "processor")}


def slope(numbers: list[int], values: list[float]) -> float:
    """Return the change per 1,000 batches over the second half."""
    half = len(values) // 2
    return float(np.polyfit(numbers[half:], values[half:], 1)[0] * 1000)


def measure(num_batches: int, every: int) -> dict[str, dict[str, dict[str, float]]]:
    """Run, and return a table for each process."""
    from vlm_stream import StreamLoader

    seen: dict[int, list[tuple[int, tuple[float, float, float]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        options = {"mode": "plain", "batch_size": 1, "epochs": None, "num_workers": 2, "max_length": 4096}
        with StreamLoader(**prepare(Path(name)), **options) as loader:
            for number, _ in enumerate(loader, 1):
                if number % every == 0:
                    for pid in (os.getpid(), *loader.worker_pids()):
                        if (found := look(pid)) is not None:
                            seen.setdefault(pid, []).append((number, found))
                if number == num_batches:
                    break
    rows = {}
    for pid, samples in seen.items():
        numbers = [number for number, _ in samples]
        columns = {title: [found[at] for _, found in samples] for at, title in enumerate(NAMES)}
        rows["trainer" if pid == os.getpid() else f"worker {len(rows)}"] = {
            title: {"middle": values[len(values) // 2], "end": values[-1], "per_1000": slope(numbers, values)}
            for title, values in columns.items()
        }
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=200, help="batches between two looks")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.batches, args.every)
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'':10}" + "".join(f"{title + ', middle':>22}{'end':>10}{'per 1,000':>12}" for title in NAMES))
    for process, row in rows.items():
        cells = (f"{v['middle']:>22.1f}{v['end']:>10.1f}{v['per_1000']:>12.3f}" for v in row.values())
        print(f"{process:10}" + "".join(cells))


if __name__ == "__main__":
    main()
