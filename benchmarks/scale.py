"""What a run of real size takes: memory, time to the first batch, state. Indexes alone; batches are bytes.

    python benchmarks/scale.py memory     10M samples in 2,000 shards, packed, 256 ranks x 8: loader, 4 builders
    python benchmarks/scale.py first      the same data, one rank: first batch, local and on S3 with 30 ms a request
    python benchmarks/scale.py state      500M samples in 100,000 shards: first step, state, memory

Shards have 5,000 samples of one or two images. Tars are files of zeros without blocks on disk; on S3 there are only
those that the first batch reads. Every figure is from a fresh process with its imports done.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import crc32c
import numpy as np

SAMPLES = 5_000
WORLD, MICRO = 256, 8
OPTIONS = {"pack_size": 8192, "micro_batches": MICRO}


@cache
def crc_of_zeros(size: int) -> int:
    """Return the checksum of so many zeros."""
    return crc32c.crc32c(bytes(size))


def make_index(seed: int) -> tuple[bytes, int]:
    """Return the bytes of an index, and the size of its tar."""
    import pyarrow as pa

    from vlm_stream.format import index_schema, write_table

    rng = np.random.default_rng(seed)
    schema = index_schema()
    num_images = rng.integers(1, 3, SAMPLES)
    total = int(num_images.sum())
    splits = np.concatenate([[0], np.cumsum(num_images)]).astype(np.int32)
    member_splits = np.concatenate([[0], np.cumsum(num_images + 1)]).astype(np.int32)
    first = member_splits[:-1]
    sizes = np.empty(int(member_splits[-1]), dtype=np.int64)
    is_text = np.zeros(len(sizes), dtype=bool)
    is_text[first] = True
    sizes[is_text] = rng.integers(300, 3000, SAMPLES)
    sizes[~is_text] = rng.integers(1_000, 8_000, total)
    names = np.arange(len(sizes)) - np.repeat(first, num_images + 1)
    whole = 512 + sizes + (-sizes % 512)
    ends = np.cumsum(whole)
    begins = ends - whole
    ranges = np.add.reduceat(whole, first)
    none = np.zeros(SAMPLES + 1, dtype=np.int32)

    def lists(name: str, where: Any, columns: list[Any]) -> Any:
        kind = schema.field(name).type
        entries = pa.StructArray.from_arrays(columns, fields=list(kind.value_type))
        return pa.Array.from_buffers(kind, SAMPLES, [None, pa.py_buffer(where)], children=[entries])

    def empty(name: str) -> Any:
        return lists(name, none, [pa.array([], field.type) for field in schema.field(name).type.value_type])

    table = pa.table(
        [
            pa.array([f"{seed * SAMPLES + number:09d}" for number in range(SAMPLES)]),
            pa.nulls(SAMPLES, pa.string()),
            pa.DictionaryArray.from_arrays(pa.array(np.zeros(SAMPLES, dtype=np.int32)), ["mock"]),
            pa.array(begins[first]),
            pa.array(ranges),
            pa.array(np.asarray([crc_of_zeros(size) for size in ranges.tolist()], dtype=np.uint32)),
            pa.array(rng.integers(20, 1500, SAMPLES).astype(np.int32)),
            pa.array(rng.integers(5, 20, SAMPLES).astype(np.int32)),
            lists("images", splits, [pa.array(rng.integers(200, 2000, total).astype(np.int32)) for _ in range(2)]),
            empty("videos"),
            empty("audios"),
            lists(
                "members",
                member_splits,
                [
                    pa.DictionaryArray.from_arrays(pa.array(names.astype(np.int32)), ["json", "0.jpg", "1.jpg"]),
                    pa.array(begins + 512),
                    pa.array(sizes),
                ],
            ),
        ],
        schema=schema,
    )
    return write_table(table), int(ends[-1]) + 1024


def make_dataset(folder: Path, num_shards: int, num_real: int) -> Path:
    """Write a manifest, and the indexes of its first shards (the others are links to these)."""
    from vlm_stream.format import Manifest, ShardList, describe_shard, index_name, save_manifest
    from vlm_stream.storage import open_store

    folder.mkdir(parents=True)
    made = [make_index(number) for number in range(num_real)]
    described = [describe_shard("", data, num_bytes=size, crc32c=0) for data, size in made]
    shards = []
    for number in range(num_shards):
        kind = number % num_real
        name = f"shard-{number:06d}.tar"
        path = folder / index_name(name)
        if number < num_real:
            path.write_bytes(made[kind][0])
        else:
            path.symlink_to(folder / index_name(f"shard-{kind:06d}.tar"))
        with (folder / name).open("wb") as tar:
            tar.truncate(described[kind].totals.bytes)
        shards.append(replace(described[kind], name=name))
    save_manifest(open_store(str(folder)), Manifest(shards=ShardList.of(shards)))
    return folder


def resident(pid: int | str = "self") -> float:
    """Return megabytes of memory that no other process shares, where the system tells; else all of it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_", "Shared_Dirty"))) / 1024


def import_all() -> float:
    """Import what a run imports; return the memory of that."""
    import pyarrow.parquet

    import vlm_stream.build
    import vlm_stream.loader

    _ = (pyarrow.parquet, vlm_stream.build, vlm_stream.loader)
    return resident()


def take_nothing(_rows: Any, _processor: Any) -> dict[str, Any]:
    """Be a batch of bytes that nobody looks at."""
    return {}


def measure_memory(folder: Path) -> dict[str, Any]:
    """Walk 6M samples of the plan of one rank; blueprints of every 50th batch are built by 4 processes."""
    before = import_all()
    from vlm_stream.dispatch import Dispatcher, DispatchOptions, ProcessPool
    from vlm_stream.options import StreamOptions
    from vlm_stream.planning import open_plan
    from vlm_stream.recipe import normalise_sources
    from vlm_stream.world import World

    options = StreamOptions(**OPTIONS, collate_fn=take_nothing, bad_budget=None)
    plan = open_plan(normalise_sources(str(folder)), options)
    begin = time.perf_counter()
    planned = plan.blueprints(World(0, WORLD))
    dispatcher = Dispatcher(
        (each for number, each in enumerate(planned) if number % 50 == 0),
        lambda listener: ProcessPool(plan.build, listener),
        DispatchOptions(num_workers=4),
    )
    peak, fresh = 0.0, 0.0
    state: dict[str, Any] = {}
    for last, _delivery in dispatcher:
        fresh = fresh or min(resident(pid) for pid in dispatcher.pids())
        peak = max(peak, resident())
        state = last.state() or {}
        if state["delivered"]["samples"] > 6_000_000:
            break
    builders = [resident(pid) for pid in dispatcher.pids()]
    seconds = time.perf_counter() - begin
    dispatcher.close()
    return {
        "loader MB above imports": round(peak - before),
        "builders MB above one at its first batch": [round(size - fresh) for size in builders],
        "a builder at its first batch, MB that it does not share": round(fresh),
        "state bytes": len(json.dumps(state)),
        "seconds": round(seconds),
    }


def measure_state(folder: Path) -> dict[str, Any]:
    """Plan the first step of a rank, and what follows."""
    before = import_all()
    from vlm_stream.options import StreamOptions
    from vlm_stream.planning import open_plan
    from vlm_stream.recipe import normalise_sources
    from vlm_stream.state import RunState
    from vlm_stream.world import World

    begin = time.perf_counter()
    plan = open_plan(normalise_sources(str(folder)), StreamOptions(**OPTIONS))
    blueprints = plan.blueprints(World(0, WORLD))
    first = next(blueprints)
    seconds = time.perf_counter() - begin
    sizes = [len(RunState(cursor=each.state()).to_dict()["vlm_stream"]) for each in (first, *islice(blueprints, 300))]
    return {
        "first step s": round(seconds, 2),
        "state bytes, first and largest": [sizes[0], max(sizes)],
        "MB above imports": round(resident() - before),
    }


def measure_first(url: str, endpoint: str | None) -> dict[str, Any]:
    """Take the first batch in this process."""
    import_all()
    from vlm_stream import StoreOptions, StreamLoader

    store = None if endpoint is None else StoreOptions(endpoint=endpoint, allow_http=True, region="us-east-1")
    begin = time.perf_counter()
    with StreamLoader(
        url, processor=None, rank=0, world_size=WORLD, store=store, bad_budget=None, collate_fn=take_nothing, **OPTIONS
    ) as loader:
        next(iter(loader))
        return {"first batch s": round(time.perf_counter() - begin, 2)}


def _child(name: str, *arguments: str) -> None:
    found = subprocess.run([sys.executable, __file__, "--child", name, *arguments], check=True, capture_output=True)
    print(f"{name}: {found.stdout.decode().strip()}", flush=True)


def main(chosen: list[str]) -> None:
    """Make the data and measure in fresh processes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "memory" in chosen or "first" in chosen:
            make_dataset(folder / "large", 2_000, 512)
        if "memory" in chosen:
            _child("memory", str(folder / "large"))
        if "first" in chosen:
            _child("first", str(folder / "large"))
            measure_on_s3(folder)
        if "state" in chosen:
            make_dataset(folder / "huge", 100_000, 512)
            _child("state", str(folder / "huge"))


def measure_on_s3(folder: Path) -> None:
    """Serve the indexes, and the tars of the first batch, by a real S3 server, each request after 30 ms."""
    from benchmarks.peers.proxy import CountingProxy
    from tests.servers import S3Server
    from vlm_stream.options import StreamOptions
    from vlm_stream.planning import open_plan
    from vlm_stream.recipe import normalise_sources
    from vlm_stream.storage import open_store
    from vlm_stream.world import World

    data = folder / "large"
    plan = open_plan(normalise_sources(str(data)), StreamOptions(**OPTIONS))
    first = next(plan.blueprints(World(0, WORLD))).blueprint
    tars = {piece.span.path for row in first.rows for piece in row}
    with S3Server(folder / "s3") as server, CountingProxy(("127.0.0.1", server.port), 0.03) as proxy:
        os.environ |= server.environment
        store = open_store(server.url("large"), server.options)
        files = [path for path in data.iterdir() if path.suffix != ".tar" or path.name in tars]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda path: store.put(path.name, path.read_bytes()), files))
        _child("first", server.url("large"), proxy.endpoint)


if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver", force=True)
    if sys.argv[1:2] == ["--child"]:
        name, *rest = sys.argv[2:]
        if name == "first":
            print(json.dumps(measure_first(rest[0], rest[1] if len(rest) > 1 else None)))
        else:
            print(json.dumps({"memory": measure_memory, "state": measure_state}[name](Path(rest[0]))))
    else:
        main(sys.argv[1:] or ["memory", "first", "state"])
