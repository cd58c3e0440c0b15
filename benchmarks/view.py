"""How long pages of the viewer take over 1,000,000 samples, on disk and on S3 with 30 ms a request.

    python benchmarks/view.py             both
    python benchmarks/view.py disk

Steps, runs and comparisons that take long are answered with a page that says so and asks for itself again: `page` is
until something is shown, `all` until the view itself and its pictures are. Both are judged, first and again.

200 shards of 5,000 samples are listed; they are one shard under 200 names, so every byte of every sample is real. On S3
there are all indexes, and the tars that the pages look at. Each page is asked for over HTTP, with its thumbnails in
parallel as a browser does; a view's time is until the last of them has come. `first` is that of a server that has just
been started, `again` that of one whose indexes were read; each `again` is at another place of the dataset.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import unescape
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SAMPLES, SHARDS = 5_000, 200
PLACES = (0, 100, 199)
LATENCY_S = 0.03
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


def measure(url: str, options: Any, processor: str, wanted_s: float) -> dict[str, Any]:
    """Return the times of each view, and which of them took longer than is wanted."""
    from vlm_stream.planning import open_plan
    from vlm_stream.processors import open_processor
    from vlm_stream.recipe import normalise_sources
    from vlm_stream.view import Viewer, ViewServer, Watched

    loaded, opened = open_processor(processor), normalise_sources(url)
    state = next(islice(open_plan(opened, options, loaded).planner.steps(options.shape(64)), 20, None)).state_after(
        None
    )
    begin = time.perf_counter()
    viewer = Viewer(opened, options, loaded, world=64, run=Watched(state=state))
    found: dict[str, Any] = {"open": round(time.perf_counter() - begin, 3)}
    shards = [f"shard-{number:06d}.tar" for number in PLACES]
    keys = [f"{number:09d}" for number in (17, 1017, 2017, 3017, 4017)]
    views = {
        "dataset": ["/dataset"] + [f"/dataset?at={place * SAMPLES + more}" for more in (96, 1000) for place in PLACES],
        "sample": [f"/sample?source=data&shard={shard}&key={key}" for key in keys for shard in shards],
        "step": [f"/step?step={step}&rank={step % 64}" for step in (0, 1, 2, 50, 60, 40, 30, 55)],
        "filter": ["/dataset?kind=video&tokens_from=100", "/dataset?entry=clips&at=500000", "/dataset?tokens_to=90"],
        "run": ["/run", "/run", "/run"],
        "compare": ["/compare?pack_size_b=4096&steps=5"] + [f"/compare?window_b={n}&steps=5" for n in (1024, 2048)],
        "text": ["/dataset?text=river&kind=video", "/dataset?text=bright%20dark&at=500000"],
    }
    with ViewServer(viewer).start() as server, ThreadPoolExecutor(6) as pool:
        base = server.url.rstrip("/")
        for name, paths in views.items():
            found[f"{name}, first"] = view(base, paths[0], pool)
        while len(viewer.catalog.known_facts()) < SHARDS:
            time.sleep(0.1)
        found["all indexes read after"] = round(time.perf_counter() - begin, 3)
        walk = viewer.book.walk(viewer.book.base)
        while walk.total is None:
            time.sleep(0.1)
        found["steps"], found["all steps planned after"] = walk.total, round(time.perf_counter() - begin, 3)
        for name, paths in views.items():
            times = [view(base, path, pool) for path in paths[1:]]
            for kind in ("page", "all"):
                values = [each[kind] for each in times]
                found[f"{name}, again, {kind}"] = {"median": statistics.median(values), "most": max(values)}
    most = {name: value["most"] for name, value in found.items() if ", again, " in name}
    most |= {f"{name}, first, {kind}": found[f"{name}, first"][kind] for name in views for kind in ("page", "all")}
    found["wanted"] = {"a view within": wanted_s, "above it": {n: s for n, s in most.items() if s > wanted_s}}
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
        print(json.dumps({"disk": measure(str(million), options, processor, 0.3)}, indent=1), flush=True)
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
                found = measure(url, replace(options, store=far), processor, 1.0)
                print(json.dumps({"s3": found | {"requests": proxy.requests, "bytes": proxy.num_bytes}}, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
