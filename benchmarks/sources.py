"""Speed and memory of reading sources, as ratios within one run. Run by hand: `python benchmarks/sources.py [--quick]`.

Each row is a fresh process, so that its peak memory (VmHWM) is its own. Seconds are of the processor, as neighbours
must not count. The yardstick of speed is reading the same bytes and doing nothing with them; the yardstick of memory is
the same process with a file of ten records.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import json, sys, time
from vlm_stream.sources import open_source
path, how = sys.argv[1:]
start = time.process_time()
num = 0
if how == "read bytes":
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            num += chunk.count(b"Q")
elif how == "json.load":
    with open(path, "rb") as file:
        num = len(json.load(file) if path.endswith(".json") else [json.loads(line) for line in file])
else:
    source = open_source(path)
    num = len(source)
    if how == "open + read all":
        for index in range(num):
            source.read(index)
    else:
        source.read(num // 2)
seconds = time.process_time() - start
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([seconds, peak / 1024]))
"""


def write_records(path: Path, num_records: int) -> None:
    """Write text records of about 700 bytes."""
    words = 'The quick brown fox, as they say, jumps over [the] "lazy" dog; C:\\new\\{x}, é漢 '
    opener = gzip.open if path.suffix == ".gz" else open
    array = ".json" in path.suffixes
    with opener(path, "wt", encoding="utf-8") as file:  # type: ignore[operator]
        file.write("[" if array else "")
        for i in range(num_records):
            turns = [{"role": "user", "content": f"Q{i} {words * 4}"}, {"role": "assistant", "content": words * 3}]
            end = (",\n" if i + 1 < num_records else "]") if array else "\n"
            file.write(json.dumps({"id": i, "messages": turns}, ensure_ascii=i % 2 == 0) + end)


def measure(path: Path, how: str) -> tuple[float, float]:
    """Return seconds and peak megabytes of one fresh process."""
    out = subprocess.run([sys.executable, "-c", CHILD, str(path), how], check=True, capture_output=True, text=True)
    seconds, peak_mb = json.loads(out.stdout)
    return seconds, peak_mb


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the records")
    small, large = (10_000, 100_000) if parser.parse_args().quick else (100_000, 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder, "tiny.jsonl")
        write_records(tiny, 10)
        base_mb = measure(tiny, "open")[1]
        print(f"peak memory of a process with 10 records: {base_mb:.0f} MB (all figures below are on top of it)\n")
        print(
            f"{'input':16}{'records':>10}{'MB':>7}  {'what':17}{'CPU s':>7}{'MB/s':>7}{'/bytes':>8}{'peak MB':>9}"
            f"{'B/record':>10}"
        )
        for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
            for num_records in (small, large):
                path = Path(folder, name)
                start = time.perf_counter()
                write_records(path, num_records)
                size_mb = path.stat().st_size / 1e6
                hows = ["read bytes", "open", "open + read all"]
                if num_records == small and path.suffix != ".gz":
                    hows.append("json.load")
                byte_seconds = 0.0
                for how in hows:
                    seconds, peak_mb = measure(path, how)
                    byte_seconds = byte_seconds or seconds
                    extra_mb = peak_mb - base_mb
                    print(
                        f"{name:16}{num_records:>10,}{size_mb:>7.0f}  {how:17}{seconds:>7.2f}{size_mb / seconds:>7.0f}"
                        f"{seconds / byte_seconds:>8.1f}{extra_mb:>9.1f}{extra_mb * 1048576 / num_records:>10.0f}"
                    )
                print(f"{'':16}(written in {time.perf_counter() - start:.0f} s with the measurements)")
                path.unlink()


if __name__ == "__main__":
    main()
