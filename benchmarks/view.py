"""How long pages of the viewer take over 1,000,000 samples, on disk and on S3 with 30 ms a request.

    python benchmarks/view.py             both
    python benchmarks/view.py disk

Steps, runs and comparisons that take long are answered with a page that says so and asks for itself again: `page` is
until something is shown, `all` until the view itself and its pictures are. Both are judged, first and again.

200 shards of 5,000 samples are listed; they are one shard under 200 names, so every byte of every sample is real. On S3
there are all indexes, and the tars that the pages look at. Each page is asked for over HTTP, with its thumbnails in
parallel as a browser does; a view's time is until the last of them has come. Servers are processes of their own. Each
`first` is the first view of a new one: at once, when it has said where it is, or a second later, as somebody has opened
the address. `again` is the slowest of some views, at other places of the dataset, once all indexes were read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SAMPLES, SHARDS = 5_000, 200
PLACES = (0, 100, 199)
LATENCY_S = 0.03
WORLD = 64
WHENS = {"first, at once": 0.0, "first, a second later": 1.0}
INDEX_BYTES = 512 << 20  # as `vlm-stream view` has it


def make_dataset(folder: Path) -> Path:
    """Write one shard of toy data, and a manifest that lists it many times."""
    from vlm_stream.convert import make_shards
    from vlm_stream.format import ShardList, index_name, load_manifest, save_manifest
    from vlm_stream.storage import open_store
    from vlm_stream.testing import build_processor, make_toy_dataset

    build_processor("qwen2_5_vl").save_pretrained(folder / "processor")
    meta = make_toy_dataset(folder / "raw", num_samples=SAMPLES)
    made = folder / "one"
    make_shards(meta, made, processor=str(folder / "processor"), samples_per_shard=SAMPLES, shuffle=0)
    manifest = load_manifest(open_store(str(made)))
    (shard,) = manifest.shards
    many = folder / "million"
    many.mkdir()
    shards = []
    for number in range(SHARDS):
        name = f"shard-{number:06d}.tar"
        os.link(made / shard.name, many / name)
        os.link(made / index_name(shard.name), many / index_name(name))
        shards.append(replace(shard, name=name, etag=None))
    save_manifest(open_store(str(many)), replace(manifest, shards=ShardList.of(shards), home=""))
    return many


def get(url: str) -> tuple[bytes, bool]:
    """Return what a URL answers, and whether it is to be asked again."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read(), "refresh" in answer.headers


def view(base: str, path: str, pool: ThreadPoolExecutor) -> dict[str, float]:
    """Return the seconds until the page has come, and until all of its pictures have."""
    begin = time.perf_counter()
    page, waits = get(base + path)
    whole = time.perf_counter() - begin
    while waits:
        page, waits = get(base + path)
    pictures = [unescape(found) for found in re.findall(r'src="(/(?:thumb|picture|frame)[^"]*)"', page.decode())]
    list(pool.map(lambda each: get(base + each), pictures))
    return {"page": round(whole, 3), "pictures": len(pictures), "all": round(time.perf_counter() - begin, 3)}


def serve(url: str, options: Any, processor: str, told: Connection) -> None:
    """Start a viewer as `vlm-stream view` does, tell its address, and what it has read when asked.

    What comes first is the state of the run that it shows; for None, it tells that of a run after some steps, and ends.
    """
    from vlm_stream.planning import open_plan
    from vlm_stream.processors import open_processor
    from vlm_stream.recipe import normalise_sources
    from vlm_stream.view import Viewer, ViewServer, Watched

    loaded, opened = open_processor(processor), normalise_sources(url)
    shape, state = options.shape(WORLD), told.recv()
    if state is None:
        state = next(islice(open_plan(opened, options, loaded).planner.steps(shape), 20, None)).state_after(None)
        told.send(state)
        return
    begin = time.perf_counter()
    viewer = Viewer(opened, options, loaded, world=WORLD, run=Watched(state=state))
    with ViewServer(viewer).start() as server:
        told.send((server.url.rstrip("/"), time.perf_counter() - begin))
        while told.recv():
            told.send((len(viewer.catalog.known_facts()), viewer.book.run_walk().total))


@contextmanager
def server(*given: Any, state: Any = None) -> Iterator[Connection]:
    """Start a server in a process of its own: a browser takes none of its time."""
    own, told = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(*given, told))
    process.start()
    own.send(state)
    try:
        yield own
    finally:
        own.send(None)
        process.join()


def measure(wanted_s: float, *given: Any) -> dict[str, Any]:
    """Return the times of each view, and which of them took longer than is wanted; `given` is what servers open."""
    with server(*given) as told:
        state = told.recv()
    shards = [f"shard-{number:06d}.tar" for number in PLACES]
    keys = [f"{number:09d}" for number in (17, 1017, 2017, 3017, 4017)]
    views = {
        "dataset": ["/dataset"] + [f"/dataset?at={place * SAMPLES + more}" for more in (96, 1000) for place in PLACES],
        "sample": [f"/sample?source=data&shard={shard}&key={key}" for key in keys for shard in shards],
        "step": [f"/step?step={step}&rank={step % 64}" for step in (21, 1, 2, 50, 60, 40, 30, 55)],
        "filter": ["/dataset?kind=video&tokens_from=100", "/dataset?entry=clips&at=500000", "/dataset?tokens_to=90"],
        "run": ["/run", "/run", "/run"],
        "compare": ["/compare?pack_size_b=4096&steps=5"] + [f"/compare?window_b={n}&steps=5" for n in (1024, 2048)],
        "text": ["/dataset?text=river&kind=video", "/dataset?text=bright%20dark&at=500000"],
    }
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(6) as pool:
        for name, paths in views.items():
            for when, after_s in WHENS.items():
                with server(*given, state=state) as told:
                    base, found["start"] = told.recv()
                    time.sleep(after_s)
                    found[f"{name}, {when}"] = view(base, paths[0], pool)
        with server(*given, state=state) as told:
            base, _ = told.recv()
            begin, read = time.perf_counter(), (0, None)
            while read[0] < SHARDS or read[1] is None:
                time.sleep(0.1)
                told.send(True)
                read = told.recv()
            found["steps"], found["all read and planned after"] = read[1], round(time.perf_counter() - begin, 3)
            for name, paths in views.items():
                times = [view(base, path, pool) for path in paths]
                found[f"{name}, again"] = {kind: max(each[kind] for each in times) for kind in times[0]}
    slow = {n: each["all"] for n, each in found.items() if isinstance(each, dict) and each["all"] > wanted_s}
    found["wanted"] = {"a view within": wanted_s, "above it": slow}
    return found


def main() -> None:
    """Measure and print."""
    from vlm_stream.options import StreamOptions
    from vlm_stream.storage import StoreOptions

    folder = Path(tempfile.mkdtemp(prefix="view-"))
    try:
        million = make_dataset(folder)
        processor = str(folder / "processor")
        options = StreamOptions(pack_size=8192, index_bytes=INDEX_BYTES)
        print(json.dumps({"disk": measure(0.3, str(million), options, processor)}, indent=1), flush=True)
        if "disk" in sys.argv[1:]:
            return
        from benchmarks.peers.proxy import CountingProxy
        from tests.servers import S3Server
        from vlm_stream.storage import open_store

        (folder / "s3").mkdir()
        with S3Server(folder / "s3") as server:
            os.environ.update(server.environment)
            url = f"s3://{server.bucket}/million"
            store = open_store(url, server.options)
            for path in sorted(million.iterdir()):
                if path.suffix != ".tar" or path.name in {f"shard-{number:06d}.tar" for number in PLACES}:
                    store.put(path.name, path.read_bytes())
            with CountingProxy(("127.0.0.1", server.port), LATENCY_S) as proxy:
                far = StoreOptions(endpoint=proxy.endpoint, region="us-east-1", allow_http=True)
                found = measure(1.0, url, replace(options, store=far), processor)
                print(json.dumps({"s3": found | {"requests": proxy.requests, "bytes": proxy.num_bytes}}, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
