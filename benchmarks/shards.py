"""Conversion speed as a ratio against copying the same media with plain tarfile, and memory at 100k and 1M records.

    python benchmarks/shards.py speed [--samples 2000] [--workers 1,2] [--folder DIR]
    python benchmarks/shards.py memory [--records 100000,1000000]

Ratios are taken in one run, alternating, because machines are noisy: compare columns, not runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


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


def copy_with_tarfile(data: Path, out: Path, samples_per_shard: int) -> tuple[float, float]:
    """Copy the same JSON and media into tars, one process, no probing and no index."""
    import io

    out.mkdir(parents=True)
    begin, cpu = time.perf_counter(), time.process_time()
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
    return time.perf_counter() - begin, time.process_time() - cpu


def time_conversion(data: Path, out: Path, workers: int, samples_per_shard: int) -> tuple[float, float]:
    """Run the converter in a process of its own, by its own clock; return seconds and CPU seconds, imports included."""
    code = (
        "import sys, json; from vlm_stream.shards import make_shards\n"
        "if __name__ == '__main__':\n"
        "    r = make_shards(sys.argv[1], sys.argv[2], media_dir=sys.argv[3], workers=int(sys.argv[4]),\n"
        "                    samples_per_shard=int(sys.argv[5]))\n"
        "    print(json.dumps(r.to_dict()))\n"
    )
    script = out.parent / "convert.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(data), str(out), str(data.parent), str(workers), str(samples_per_shard)]
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PATH": "/usr/bin:/bin"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report = json.loads(result.stdout)
    assert report["num_dropped"] == 0, report
    return float(report["seconds"]), cpu


def run_speed(args: argparse.Namespace) -> None:
    """Print ratios: one worker in this process, warm, in short alternations; then whole runs of several workers."""
    from vlm_stream.shards import make_shards

    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="bench-shards-"))
    try:
        small = make_input(folder / "small", args.per_shard)
        print(f"one worker, {args.repeats} alternations of {args.per_shard} samples ({_megabytes(small):.0f} MB)")
        measured: dict[str, list[tuple[float, float]]] = {"tarfile": [], "make_shards": []}
        for repeat in range(args.repeats):
            out = folder / f"out{repeat}"
            measured["tarfile"].append(copy_with_tarfile(small, out, args.per_shard))
            shutil.rmtree(out)
            begin, cpu = time.perf_counter(), time.process_time()
            make_shards(small, out, media_dir=str(small.parent), samples_per_shard=args.per_shard)
            measured["make_shards"].append((time.perf_counter() - begin, time.process_time() - cpu))
            shutil.rmtree(out)
        _print_rows(measured, _megabytes(small))
        large = make_input(folder / "large", args.samples)
        print(
            f"\nwhole runs, {args.samples} samples ({_megabytes(large):.0f} MB), processes started and modules imported"
        )
        measured = {"tarfile": [copy_with_tarfile(large, folder / "plain", args.per_shard)]}
        for workers in args.workers:
            out = folder / f"out-{workers}"
            measured[f"{workers} worker(s)"] = [time_conversion(large, out, workers, args.per_shard)]
            shutil.rmtree(out)
        _print_rows(measured, _megabytes(large))
    finally:
        shutil.rmtree(folder)


def _megabytes(data: Path) -> float:
    return sum(path.stat().st_size for path in (data.parent / "media").iterdir()) / 1e6


def _print_rows(measured: dict[str, list[tuple[float, float]]], megabytes: float) -> None:
    """Print the best wall-clock and CPU seconds of each, and their ratios to the first."""
    best = {name: [min(times) for times in zip(*runs, strict=True)] for name, runs in measured.items()}
    base, base_cpu = next(iter(best.values()))
    print(f"{'':16}{'seconds':>9}{'MB/s':>7}{'ratio':>7}{'CPU s':>8}{'CPU ratio':>11}")
    for name, (seconds, cpu) in best.items():
        rates = f"{seconds:9.3f}{megabytes / seconds:7.0f}{base / seconds:7.2f}{cpu:8.3f}{base_cpu / cpu:11.2f}"
        print(f"{name:16}{rates}", flush=True)


def run_memory(args: argparse.Namespace) -> None:
    """Print the peak memory of conversions of text records, each in a process of its own."""
    if args.one is not None:
        from vlm_stream.shards import make_shards

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
    speed.add_argument("--samples", type=int, default=2000)
    speed.add_argument("--per-shard", type=int, default=250)
    speed.add_argument("--workers", type=numbers, default=[1, 2])
    speed.add_argument("--repeats", type=int, default=30)
    speed.add_argument("--folder")
    memory = commands.add_parser("memory")
    memory.add_argument("--records", type=numbers, default=[100_000, 1_000_000])
    memory.add_argument("--folder")
    memory.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    (run_speed if args.command == "speed" else run_memory)(args)


if __name__ == "__main__":
    main()
