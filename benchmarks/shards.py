"""Conversion speed as a ratio against copying the same media with plain tarfile, and memory at 100k and 1M records.

    python benchmarks/shards.py speed [--samples 4000] [--workers 1,2] [--folder DIR]
    python benchmarks/shards.py memory [--records 100000,1000000]

Ratios are medians of alternations in one run, because machines are noisy: compare columns, not runs. `make_shards`
leaves its shards on disk; plain tarfile leaves them to the system, so "tarfile, flushed" shows what the disk asks for.
`--folder /dev/shm` takes the disk out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_FEW = 16
"""Samples of a conversion that shows its fixed part."""


def make_input(folder: Path, num_samples: int) -> Path:
    """Write JPEGs near 200 KB (1024x768), one for each sample of a few distinct pictures, and JSON lines over them."""
    import io

    import numpy as np
    from PIL import Image

    def make_jpeg(seed: int) -> bytes:
        rough = np.random.default_rng(seed).integers(0, 256, (96, 128, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(rough).resize((1024, 768), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=86)
        return buffer.getvalue()

    media = folder / "media"
    media.mkdir(parents=True)
    pictures = [make_jpeg(seed) for seed in range(16)]
    path = folder / "data.jsonl"
    with path.open("w") as file:
        for number in range(num_samples):
            (media / f"{number:06d}.jpg").write_bytes(pictures[number % len(pictures)])
            turns = [
                {"role": "user", "content": f"<image>What is in picture {number}? Say it in a few words."},
                {"role": "assistant", "content": "A pattern of coloured shapes on a plain ground. " * 4},
            ]
            file.write(json.dumps({"messages": turns, "images": [f"media/{number:06d}.jpg"]}) + "\n")
    return path


Seconds: TypeAlias = "tuple[float, float]"
"""By the clock, and of CPU."""


def copy_with_tarfile(data: Path, out: Path, samples_per_shard: int, *, flush: bool = False) -> None:
    """Copy the same JSON and media into tars, one process, no probing and no index."""
    import io

    out.mkdir(parents=True)
    lines = data.read_text().splitlines()
    for first in range(0, len(lines), samples_per_shard):
        with tarfile.open(out / f"{first:06d}.tar", "w") as tar:
            for number, line in enumerate(lines[first : first + samples_per_shard], first):
                record = json.loads(line)
                text = json.dumps(record).encode()
                info = tarfile.TarInfo(f"{number:09d}.json")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
                tar.add(data.parent / record["images"][0], f"{number:09d}.0.jpg")
        if flush:
            with (out / f"{first:06d}.tar").open("rb") as file:
                os.fsync(file.fileno())


def time_here(convert: Callable[[], object], out: Path) -> Seconds:
    """Run one conversion in this process, and remove what it made."""
    begin, cpu = time.perf_counter(), time.process_time()
    convert()
    seconds = time.perf_counter() - begin, time.process_time() - cpu
    shutil.rmtree(out)
    return seconds


def time_process(data: Path, out: Path, workers: int, samples_per_shard: int) -> Seconds:
    """Run the converter in a process of its own, its start and its imports included."""
    code = (
        "import sys; from vlm_stream.convert import make_shards\n"
        "if __name__ == '__main__':\n"
        "    r = make_shards(sys.argv[1], sys.argv[2], media_dir=sys.argv[3], workers=int(sys.argv[4]),\n"
        "                    samples_per_shard=int(sys.argv[5]))\n"
        "    assert r.num_dropped == 0, r\n"
    )
    script = out.parent / "convert.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(data), str(out), str(data.parent), str(workers), str(samples_per_shard)]
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PATH": "/usr/bin:/bin"}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, env=environment)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(out)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_speed(args: argparse.Namespace) -> None:
    """Print ratios of one worker in this process, warm; its fixed part; then whole processes of several workers."""
    from vlm_stream.convert import make_shards

    def convert(data: Path) -> object:
        return make_shards(data, out, media_dir=str(data.parent), samples_per_shard=args.per_shard)

    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="bench-shards-"))
    out = folder / "out"
    try:
        few = make_input(folder / "few", _FEW)
        data = make_input(folder / "all", args.samples)
        size = sum(path.stat().st_size for path in (data.parent / "media").iterdir()) / 1e6
        time_here(partial(convert, few), out)  # imports
        runs: dict[str, Callable[[], Seconds]] = {
            "tarfile": lambda: time_here(lambda: copy_with_tarfile(data, out, args.per_shard), out),
            "tarfile, flushed": lambda: time_here(
                lambda: copy_with_tarfile(data, out, args.per_shard, flush=True), out
            ),
            "make_shards": lambda: time_here(partial(convert, data), out),
            "of it fixed": lambda: time_here(partial(convert, few), out),
        }
        for workers in args.workers:
            runs[f"process, {workers} worker(s)"] = partial(time_process, data, out, workers, args.per_shard)
        runs["of it fixed (1)"] = partial(time_process, few, out, 1, args.per_shard)
        print(f"{args.repeats} alternations of {args.samples} samples ({size:.0f} MB), {args.per_shard} in a shard")
        measured: dict[str, list[Seconds]] = {name: [] for name in runs}
        for _ in range(args.repeats):
            for name, run in runs.items():
                measured[name].append(run())
        print_rows(measured, size)
    finally:
        shutil.rmtree(folder)


def print_rows(measured: dict[str, list[Seconds]], megabytes: float) -> None:
    """Print medians of seconds and CPU seconds, and of their ratios to the first of the same alternation."""
    first = next(iter(measured.values()))
    print(f"{'':22}{'seconds':>9}{'MB/s':>7}{'ratio':>7}{'CPU s':>8}{'CPU ratio':>11}")
    for name, runs in measured.items():
        seconds, cpu = (median(times) for times in zip(*runs, strict=True))
        if "fixed" in name:  # the part that does not grow with the data
            print(f"{name:22}{seconds:9.3f}{'':14}{cpu:8.3f}", flush=True)
            continue
        ratio, cpu_ratio = (median(a[i] / b[i] for a, b in zip(first, runs, strict=True)) for i in (0, 1))
        print(f"{name:22}{seconds:9.3f}{megabytes / seconds:7.0f}{ratio:7.2f}{cpu:8.3f}{cpu_ratio:11.2f}", flush=True)


def run_memory(args: argparse.Namespace) -> None:
    """Print the peak memory of conversions of text records, each in a process of its own."""
    if args.one is not None:
        from vlm_stream.convert import make_shards

        path, out = args.one
        report = make_shards(path, out, samples_per_shard=10_000, shuffle=1)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"peak_mb": peak, "samples": report.totals.samples, "seconds": report.seconds}))
        return
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="bench-shards-"))
    print(f"{'input':>22}{'file MB':>10}{'samples':>10}{'seconds':>9}{'peak MB':>9}")
    try:
        for form in ("jsonl", "json"):
            for num_records in args.records:
                path = folder / f"data.{form}"
                write_text_records(path, num_records)
                out = folder / "out"
                command = [sys.executable, __file__, "memory", "--one", str(path), str(out)]
                result = subprocess.run(command, check=True, capture_output=True, text=True)
                found = json.loads(result.stdout)
                print(
                    f"{f'{num_records} {form}':>22}{path.stat().st_size / 1e6:10.0f}{found['samples']:10}"
                    f"{found['seconds']:9.1f}{found['peak_mb']:9.0f}",
                    flush=True,
                )
                shutil.rmtree(out)
                path.unlink()
    finally:
        shutil.rmtree(folder)


def write_text_records(path: Path, num_records: int) -> None:
    """Write text records of about 500 bytes, as lines or as one array."""
    with path.open("w") as file:
        file.write("[" if path.suffix == ".json" else "")
        for number in range(num_records):
            turns = [
                {"role": "user", "content": f"Question {number}: " + "why is the sky blue and the grass green? " * 4},
                {"role": "assistant", "content": "Because light scatters. " * 8},
            ]
            separator = ("" if not number else ",\n") if path.suffix == ".json" else ""
            file.write(separator + json.dumps({"id": number, "messages": turns}))
            file.write("\n" if path.suffix == ".jsonl" else "")
        file.write("]" if path.suffix == ".json" else "")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    speed = commands.add_parser("speed")
    speed.add_argument("--samples", type=int, default=4000)
    speed.add_argument("--per-shard", type=int, default=250)
    speed.add_argument("--workers", type=numbers, default=[1, 2])
    speed.add_argument("--repeats", type=int, default=7)
    speed.add_argument("--folder")
    memory = commands.add_parser("memory")
    memory.add_argument("--records", type=numbers, default=[100_000, 1_000_000])
    memory.add_argument("--folder")
    memory.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    (run_speed if args.command == "speed" else run_memory)(args)


if __name__ == "__main__":
    main()
