"""Five figures of storage, as ratios of one run on one machine.

    python benchmarks/storage.py [--peers PYTHON] [figure ...]

Figures: `random` (S3 at concurrency 32 against boto3 and s3fs), `sequential` (local tars against webdataset), `window`
(requests and bytes per sample), `faults` (through a proxy that spoils requests), `kills` (kill -9 during cache fill).
PYTHON is an interpreter that has boto3 and s3fs; by default the one that runs this. Every client runs in a process of
its own, in turns, and reads the same ranges in the same order.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.storage import Reading, Span, SpanReader, SpanResult

HERE = Path(__file__).resolve()
KB, MB = 1024, 1024 * 1024
CONCURRENCY = 32
ROUNDS = 9


# --- What one client does, in a process of its own. Peers import nothing of this package. -------------------------


def read_boto3(plan: dict) -> int:
    """Read with boto3 and threads."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3", endpoint_url=plan["endpoint"], region_name="us-east-1", config=Config(max_pool_connections=CONCURRENCY)
    )

    def one(place: list) -> int:
        key, offset, size = place
        answer = client.get_object(Bucket=plan["bucket"], Key=key, Range=f"bytes={offset}-{offset + size - 1}")
        return len(answer["Body"].read())

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return sum(pool.map(one, plan["places"]))


def read_s3fs(plan: dict) -> int:
    """Read with s3fs's own concurrent ranges."""
    import s3fs

    files = s3fs.S3FileSystem(
        endpoint_url=plan["endpoint"],
        client_kwargs={"region_name": "us-east-1"},
        config_kwargs={"max_pool_connections": CONCURRENCY},
    )
    keys, offsets, sizes = zip(*plan["places"], strict=True)
    paths = [f"{plan['bucket']}/{key}" for key in keys]
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    return sum(map(len, files.cat_ranges(paths, list(offsets), ends, batch_size=CONCURRENCY, max_gap=None)))


def read_bare(plan: dict) -> int:
    """Read with the client that this package uses, and nothing around it: unchecked, without retries."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(plan["bucket"], endpoint=plan["endpoint"], region="us-east-1", client_options={"allow_http": True})
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return sum(
            pool.map(
                lambda place: len(obstore.get_range(store, place[0], start=place[1], length=place[2])), plan["places"]
            )
        )


def _read_batches(reader: SpanReader, spans: list[Span], size: int = 256) -> Iterator[SpanResult]:
    """Yield the samples of one batch after the other, with the next one under way."""
    readings: deque[Reading] = deque()
    for begin in range(0, len(spans), size):
        readings.append(reader.begin(spans[begin : begin + size]))
        if len(readings) == 2:
            yield from readings.popleft().results()
    while readings:
        yield from readings.popleft().results()


def read_ours(plan: dict) -> int:
    """Read with SpanReader: checked, and in order."""
    from vlm_stream.storage import ReadOptions, RetryOptions, SpanReader, StoreOptions

    options = None
    if plan.get("endpoint"):
        options = StoreOptions(
            endpoint=plan["endpoint"], region="us-east-1", allow_http=True, retry=RetryOptions(**plan.get("retry", {}))
        )
    num_bytes = 0
    digest = hashlib.blake2b()
    with SpanReader(ReadOptions(**plan.get("read", {})), store_options=options) as reader:
        for tag, result in enumerate(_read_batches(reader, plan["spans"])):
            assert not isinstance(result, Exception), result
            for name, view in result.items():
                num_bytes += len(view)
                if plan.get("digest"):
                    digest.update(f"{tag}/{name}".encode())
                    digest.update(view)
        totals = reader.metrics
        plan["metrics"] = asdict(totals) | {
            "requests_per_sample": totals.requests / max(totals.samples, 1),
            "read_amplification": totals.bytes_read / max(totals.bytes_wanted, 1),
        }
    plan["digest_of_bytes"] = digest.hexdigest()
    return num_bytes


def read_webdataset(plan: dict) -> int:
    """Read whole tars with webdataset, undecoded."""
    import webdataset

    dataset = webdataset.WebDataset(plan["tars"], shardshuffle=False)
    return sum(len(sample["json"]) + len(sample["0.jpg"]) for sample in dataset)


CLIENTS = {"boto3": read_boto3, "s3fs": read_s3fs, "bare": read_bare, "ours": read_ours, "webdataset": read_webdataset}
MODULES = {
    "boto3": ["boto3"],
    "s3fs": ["s3fs"],
    "bare": ["obstore.store"],
    "ours": ["obstore.store", "vlm_stream.storage.remote"],
    "webdataset": ["webdataset"],
}


def run_client(name: str, plan_file: str) -> None:
    """Read the plan's ranges and print seconds, processor seconds and bytes; imports are not counted."""
    plan = json.loads(Path(plan_file).read_text())
    for module in MODULES[name]:
        __import__(module)
    if name == "ours":
        from vlm_stream.storage import Member, Span

        plan["spans"] = [
            Span(plan["root"], path, offset, size, crc, tuple(Member(*m) for m in members), shard_size)
            for path, offset, size, crc, members, shard_size in plan["spans"]
        ]
    cpu, begun = time.process_time(), time.perf_counter()
    num_bytes = CLIENTS[name](plan)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    result = {"seconds": seconds, "cpu": cpu, "bytes": num_bytes, "metrics": plan.get("metrics", {})}
    print(json.dumps(result | {"digest": plan.get("digest_of_bytes")}))


def measure(name: str, plan: dict, folder: Path, python: str = sys.executable) -> dict:
    """Run one client in a process of its own."""
    file = folder / f"plan-{name}.json"
    file.write_text(json.dumps(plan))
    done = subprocess.run(
        [python, str(HERE), "--client", name, str(file)],
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def in_turns(clients: dict[str, str], plan: dict, folder: Path, rounds: int = ROUNDS) -> dict[str, dict]:
    """Run clients in turns; return the best run of each: what other work on the machine disturbed least."""
    runs: dict[str, list[dict]] = {name: [] for name in clients}
    for _ in range(rounds):
        for name, python in clients.items():
            runs[name].append(measure(name, plan, folder, python))
    return {name: min(each, key=lambda run: run["seconds"]) for name, each in runs.items()}


# --- Data -----------------------------------------------------------------------------------------------------------


def make_spans(store, *, num_shards: int, num_samples: int, mean_bytes: int, seed: int = 0) -> list[list]:
    """Write real tars of random bytes into a store; return the rows of their index."""
    from vlm_stream.storage import crc32c_of

    rng = random.Random(seed)
    spans = []
    for shard in range(num_shards):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for sample in range(num_samples):
                for name, size in (("json", 500), ("0.jpg", int(mean_bytes * rng.uniform(0.5, 1.5)))):
                    info = tarfile.TarInfo(f"{shard:04d}{sample:06d}.{name}")
                    info.size = size
                    tar.addfile(info, io.BytesIO(rng.randbytes(size)))
        blob, path = buffer.getvalue(), f"shard-{shard:06d}.tar"
        store.put(path, blob)
        with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
            infos = tar.getmembers()
        for json_info, jpg_info in zip(infos[::2], infos[1::2], strict=True):
            begin, end = json_info.offset, jpg_info.offset_data + -(-jpg_info.size // 512) * 512
            members = [["json", json_info.offset_data, 500], ["0.jpg", jpg_info.offset_data, jpg_info.size]]
            spans.append([path, begin, end - begin, crc32c_of(blob[begin:end]), members, len(blob)])
    return spans


def say(figure: str, wanted: str, measured: str) -> None:
    """Print one row of the table."""
    print(f"| {figure} | {wanted} | {measured} |", flush=True)


# --- Figures --------------------------------------------------------------------------------------------------------


def figure_random(server, folder: Path, peers: str) -> None:
    """Every third sample, shuffled: no two are neighbours, so nothing can be merged."""
    from vlm_stream.storage import open_store

    store = open_store(server.url("random"), server.options)
    spans = make_spans(store, num_shards=12, num_samples=250, mean_bytes=200 * KB)[::3]
    random.Random(1).shuffle(spans)
    places = [[f"random/{path}", offset, size] for path, offset, size, *_ in spans]
    plan = {"endpoint": server.endpoint, "bucket": server.bucket, "root": store.root, "spans": spans, "places": places}
    runs = in_turns({"ours": sys.executable, "bare": sys.executable, "boto3": peers, "s3fs": peers}, plan, folder)
    ours = runs["ours"]
    rate = {name: run["bytes"] / run["seconds"] / 1e6 for name, run in runs.items()}
    cost = {name: run["cpu"] / (run["bytes"] / 1e9) for name, run in runs.items()}
    rates = ", ".join(f"{name} {value:.0f}" for name, value in rate.items())
    costs = ", ".join(f"{name} {value:.2f}" for name, value in cost.items())
    ratios = ", ".join(f"{rate['ours'] / rate[name]:.2f}x {name}" for name in ("boto3", "s3fs", "bare"))
    requests = f"{ours['metrics']['requests_per_sample']:.2f} requests a sample"
    say("1 random, 32 at a time, MB/s", "3x boto3, 2.5x s3fs", f"{rates}: {ratios}; {requests}")
    say("1 client CPU, s/GB", "1/3 of boto3", f"{costs}: 1/{cost['boto3'] / cost['ours']:.1f} of boto3")


def figure_sequential(folder: Path) -> None:
    """All samples of local tars, in order."""
    from vlm_stream.storage import open_store

    store = open_store(str(folder / "tars"))
    spans = make_spans(store, num_shards=10, num_samples=400, mean_bytes=200 * KB)
    tars = [str(folder / "tars" / info.path) for info in store.list()]
    plan = {"root": store.root, "spans": spans, "tars": tars}
    runs = in_turns({"ours": sys.executable, "webdataset": sys.executable}, plan, folder)
    rate = {name: run["bytes"] / run["seconds"] / 1e6 for name, run in runs.items()}
    say(
        "2 sequential local, MB/s",
        "3x webdataset",
        f"ours {rate['ours']:.0f}, webdataset {rate['webdataset']:.0f}: {rate['ours'] / rate['webdataset']:.1f}x",
    )


def figure_window(server, folder: Path) -> None:
    """One window out of a shuffled dataset of twice its size."""
    from vlm_stream.storage import open_store

    store = open_store(server.url("window"), server.options)
    spans = make_spans(store, num_shards=32, num_samples=256, mean_bytes=200 * KB)
    random.Random(2).shuffle(spans)
    plan = {"endpoint": server.endpoint, "root": store.root, "spans": spans[:4096]}
    metrics = measure("ours", plan, folder)["metrics"]
    say(
        "3 window of 4,096 from S3",
        "<= 1.0 requests a sample, <= 1.2 bytes a byte",
        f"{metrics['requests_per_sample']:.3f} requests a sample, {metrics['read_amplification']:.3f} bytes a byte",
    )


def serve_faults(port: int, mix: dict, pipe) -> None:
    """Run the proxy in a process of its own until the other end of the pipe closes."""
    from tests.servers import FaultMix
    from vlm_stream.chaos import FaultProxy

    with FaultProxy(port) as proxy:
        proxy.faults = FaultMix(**mix)
        pipe.send(proxy.port)
        with contextlib.suppress(EOFError):
            pipe.recv()


def figure_faults(server, folder: Path) -> None:
    """The same samples through the proxy, without and with faults."""
    from vlm_stream.storage import open_store

    store = open_store(server.url("faults"), server.options)
    spans = make_spans(store, num_shards=12, num_samples=250, mean_bytes=200 * KB)
    random.Random(3).shuffle(spans)
    context = multiprocessing.get_context("spawn")
    spoiled = {"failing": 0.01, "throttled": 0.05, "cut": 0.02}
    pairs = []
    for turn in range(ROUNDS):
        runs = []
        for mix in ({}, spoiled):
            here, there = context.Pipe()
            process = context.Process(target=serve_faults, args=(server.port, {**mix, "seed": turn}, there))
            process.start()
            endpoint = f"http://127.0.0.1:{here.recv()}"
            plan = {"endpoint": endpoint, "root": store.root, "spans": spans, "digest": True}
            runs.append(measure("ours", plan, folder))
            here.close()
            there.close()
            process.kill()
            process.join()
        pairs.append(runs)
    ratios = [clean["seconds"] / faulty["seconds"] for clean, faulty in pairs]
    same = len({run["digest"] for runs in pairs for run in runs}) == 1
    clean, faulty = pairs[0]
    metrics = faulty["metrics"]
    say(
        "4 faults (1 % failing, 5 % throttled, 2 % cut)",
        "same bytes, >= 0.7 of clean",
        f"{'same' if same else 'OTHER'} samples, order and bytes; {statistics.median(ratios):.2f} of clean "
        f"({metrics['requests']} requests, {clean['bytes'] / 1e6:.0f} MB)",
    )


def figure_kills(server, folder: Path) -> None:
    """Fifty kills at random moments."""
    from tests.storage.kill_fill import kill_during_fill
    from tests.storage.shard_data import write_shards
    from vlm_stream.chaos import Fault, FaultProxy
    from vlm_stream.storage import StoreOptions

    shards = write_shards(
        server.url("kills"), num_shards=6, num_samples=10, size=40_000, seed=4, options=server.options
    )
    with FaultProxy(server.port) as proxy:
        proxy.faults = lambda *_: Fault("slow", seconds=0.0003)
        options = StoreOptions(endpoint=proxy.endpoint, region="us-east-1", allow_http=True)
        num_parts = kill_during_fill(shards, folder / "cache", options, num_kills=50)
    say(
        "5 kill -9 during cache fill",
        "50 kills, no wrong byte",
        f"50 kills, {num_parts} unfinished downloads left "
        f"behind by them, no wrong byte in any complete file, none served",
    )


def main() -> None:
    """Run the figures that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", help="all when none is named")
    parser.add_argument("--peers", default=sys.executable, help="interpreter with boto3 and s3fs")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        run_client(*arguments.client)
        return
    sys.path.insert(0, str(HERE.parent.parent))
    from tests.servers import S3Server

    figures = arguments.figures or ["random", "sequential", "window", "faults", "kills"]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server = None
        if set(figures) - {"sequential"}:
            server = stack.enter_context(S3Server(folder / "s3", "-filer.maxMB=1"))
            os.environ.update(server.environment)
        print("| figure | wanted | measured |\n|---|---|---|")
        for figure in figures:
            match figure:
                case "random":
                    figure_random(server, folder, arguments.peers)
                case "sequential":
                    figure_sequential(folder)
                case "window":
                    figure_window(server, folder)
                case "faults":
                    figure_faults(server, folder)
                case "kills":
                    figure_kills(server, folder)
                case _:
                    raise SystemExit(f"unknown figure '{figure}'")


if __name__ == "__main__":
    main()
