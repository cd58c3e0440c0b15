"""Clips a second of runs that read ahead: 32 frames of clips of 60 min, from S3 with 30 ms a request.

    python benchmarks/video_runs.py [--clips FOLDER] [--gbit N] [--frames N]

Everybody has two worker processes and calls the same processor, whose pictures are small. `frames` and `whole` are a
`StreamLoader` with two workers, over a dataset with tables of clips and one without. `decord` (on downloaded bytes) and
`torchcodec` (on a file of fsspec, approximate seeks) are two processes with threads, each of which reads, decodes and
encodes one clip after the other, so that others wait meanwhile; what they make goes nowhere, which favours them. A
first round tries numbers of threads and sizes of fsspec's buffer; the best ones go on, in turns. `core s` is processor
time for each clip of all processes of a way; server and proxy, which share the machine, are not in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.video import BUCKET_PATH, CASES, LATENCY_S, READERS, make_clip, write_records

NUM_CLIPS, WARM_S, WINDOW_S, ROUNDS = 4, 2.0, 5.0, 2
MIB = 1 << 20
SETTINGS: dict[str, list[dict[str, int]]] = {
    "frames": [{}],
    "whole": [{}],
    "decord": [{"threads": threads} for threads in (1, 2)],
    "torchcodec": [{"threads": threads, "buffer": MIB // 8} for threads in (8, 16)],
}


def run(way: str, place: dict[str, Any]) -> None:
    """Print clips a second, and seconds of processor time for each."""
    from vlm_stream.testing import build_processor

    processor = build_processor("qwen2_5_vl", video={"size": {"shortest_edge": 784, "longest_edge": 1568}})
    rate = _rate_of_threads if "threads" in place else _rate_of_loader
    print(json.dumps(rate(way, place, processor)), flush=True)


def _rate_of_loader(way: str, place: dict[str, Any], processor: Any) -> tuple[float, float]:
    from vlm_stream import StreamLoader
    from vlm_stream.storage import StoreOptions

    store = StoreOptions(endpoint=place["endpoint"], region="us-east-1", allow_http=True)
    options: dict[str, Any] = {"max_frames": place["frames"], "epochs": None, "store": store}
    url = place["url"] if way == "frames" else f"{place['url']}-whole"
    with StreamLoader(url, processor=processor, mode="plain", batch_size=1, num_workers=2, **options) as loader:
        return _rate(iter(loader), lambda: [os.getpid(), *loader.worker_pids()])


def _rate_of_threads(way: str, place: dict[str, Any], processor: Any) -> tuple[float, float]:
    import torch

    torch.set_num_threads(1)
    read = READERS[way](place)

    def make() -> Any:
        return processor.video_processor(read(place["frames"]), do_sample_frames=False, return_tensors="pt")

    def batches() -> Iterator[Any]:
        waiting = deque(pool.submit(make) for _ in range(2 * place["threads"]))
        while True:
            yield waiting.popleft().result()
            waiting.append(pool.submit(make))

    with ThreadPoolExecutor(place["threads"]) as pool:
        found = _rate(batches(), lambda: [os.getpid()])
        pool.shutdown(cancel_futures=True)
    return found


def _rate(batches: Iterator[Any], pids: Callable[[], list[int]]) -> tuple[float, float]:
    next(batches)
    warm = time.perf_counter() + WARM_S
    while time.perf_counter() < warm:
        next(batches)
    begin, cpu, count = time.perf_counter(), _processor_time(pids()), 0
    while time.perf_counter() < begin + WINDOW_S:
        next(batches)
        count += 1
    return count / (time.perf_counter() - begin), (_processor_time(pids()) - cpu) / count


def _processor_time(pids: list[int]) -> float:
    """Return for how many seconds processes have computed."""
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def measure(way: str, place: dict[str, Any], setting: dict[str, int]) -> list[float]:
    """Return clips a second of two workers, and seconds of processor time for each clip."""
    command = [sys.executable, __file__, "--way", way, "--place", json.dumps(place | setting)]
    count = 2 if "threads" in setting else 1
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    rates, cpu = zip(*(json.loads(each.communicate(timeout=200)[0]) for each in processes), strict=True)
    return [sum(rates), statistics.fmean(cpu)]


def _print_row(way: str, setting: dict[str, int], found: list[float]) -> None:
    told = " ".join(f"{name} {value}" for name, value in setting.items())
    print(f"{way:>11} {told:>24} {found[0]:>8.2f} clips/s {found[1]:>8.3f} core s", flush=True)


def main() -> None:
    """Try settings, then take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", choices=CASES, default="60 min", help="of the clips")
    parser.add_argument("--frames", type=int, default=32, help="of each clip")
    parser.add_argument("--gbit", type=float, help="what the network carries; by default nothing limits it")
    parser.add_argument("--clips", metavar="FOLDER", help="keep the clip there, for the next run")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        run(args.way, json.loads(args.place))
        return
    with tempfile.TemporaryDirectory() as temporary:
        clip = make_clip(Path(args.clips or temporary), CASES[args.length])
        _measure_all(Path(temporary), clip, args)


def _measure_all(folder: Path, clip: Path, args: argparse.Namespace) -> None:
    from benchmarks.peers.proxy import CountingProxy
    from tests.servers import S3Server
    from vlm_stream.convert import make_shards
    from vlm_stream.storage import open_store

    make_shards(write_records(folder, [clip] * NUM_CLIPS), folder / "shards", samples_per_shard=1, workers=1)
    (folder / "s3").mkdir()
    with S3Server(folder / "s3") as server:
        os.environ.update(server.environment)
        url = server.url(BUCKET_PATH)
        with_tables, whole = (open_store(where, server.options) for where in (url, f"{url}-whole"))
        for path in (*filter(Path.is_file, (folder / "shards").iterdir()), clip):
            with_tables.put(path.name, path)
            if not path.name.endswith(".clips.bin"):
                whole.put(path.name, path)
        limit = args.gbit * 1e9 / 8 if args.gbit else float("inf")
        with CountingProxy(("127.0.0.1", server.port), LATENCY_S, limit) as proxy:
            place = {"endpoint": proxy.endpoint, "url": url, "shard": 0, "file": clip.name, "frames": args.frames}
            ways = [way for way in READERS if way in ("frames", "whole") or importlib.util.find_spec(way)]
            best: dict[str, dict[str, int]] = {}
            rounds: dict[str, list[list[float]]] = {}
            for way in ways:
                tried = [(measure(way, place, setting), number) for number, setting in enumerate(SETTINGS[way])]
                for found, number in tried:
                    _print_row(way, SETTINGS[way][number], found)
                best[way], rounds[way] = SETTINGS[way][max(tried)[1]], [max(tried)[0]]
            for _ in range(ROUNDS - 1):
                for way in ways:
                    rounds[way].append(measure(way, place, best[way]))
            print("medians:")
            for way in ways:
                _print_row(way, best[way], [statistics.median(column) for column in zip(*rounds[way], strict=True)])


if __name__ == "__main__":
    main()
