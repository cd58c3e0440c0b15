"""How soon the first batch comes from a dataset of 1,000 shards on a real S3 server, against encoding one batch.

    python benchmarks/start.py [photos] [toy]

`photos`: packs of 8,192 tokens, JPEGs around 1024x768 and text, the pixel limits of the published Qwen2.5-VL
checkpoints. `toy`: packs of 2,048 tokens of toy media. Every start is a fresh process with its imports done; the clock
runs from before the loader is made until its first batch is in hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from vlm_stream import StreamLoader, make_shards
from vlm_stream.storage import StoreOptions
from vlm_stream.testing import build_processor, make_toy_dataset
from vlm_stream.testing.toy_images import make_toy_pixels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import S3Server

NUM_SHARDS = 1000
SAMPLES_PER_SHARD = 20
REPEATS = 5
LATER_BATCHES = 20
PACK_SIZE = {"photos": 8192, "toy": 2048}
_ENCODE = "encode, collate"
_LIMITS = {
    "photos": {"size": {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}},
    "toy": {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 256 * 28 * 28}},
}
_PHOTO_SIZES = ((768, 1024), (1024, 768), (683, 1024), (720, 1280), (480, 640), (900, 1200), (768, 768), (1080, 1440))


def make_photos(folder: Path, num_samples: int) -> Path:
    """Write conversations about a handful of pictures, used again and again; return the data file."""
    from PIL import Image

    (folder / "media").mkdir(parents=True)
    for number, (height, width) in enumerate(_PHOTO_SIZES):
        noise = np.random.default_rng(number).normal(0, 6, (height, width, 1))  # the grain that makes photos large
        pixels = np.clip(make_toy_pixels(height, width, number) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "media" / f"{number}.jpg", quality=85)
    rng = np.random.default_rng(0)
    words = ["the", "picture", "shows", "a", "street", "with", "two", "people", "and", "red", "signs", "above"]
    lines = []
    for sample in range(num_samples):
        num_images = (1, 1, 0, 1, 1, 2, 1, 0, 1, 1)[sample % 10]
        images = [f"{number}.jpg" for number in rng.integers(0, len(_PHOTO_SIZES), num_images)]
        question, answer = (" ".join(rng.choice(words, rng.integers(5, most))) for most in (30, 250))
        messages = [
            {"role": "user", "content": "<image>" * num_images + question},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages, "images": images}) + "\n")
    (folder / "photos.jsonl").write_text("".join(lines))
    return folder / "photos.jsonl"


def make_data(kind: str, folder: Path, server: S3Server) -> None:
    """Write 1,000 shards of a kind of data to the server, and their processor to the folder."""
    limits = _LIMITS[kind]
    processor = build_processor("qwen2_5_vl", image=limits, video=limits | {"cap_pixels_per_frame": False})
    processor.save_pretrained(folder / "processor")
    num_samples = NUM_SHARDS * SAMPLES_PER_SHARD
    settings: dict[str, Any] = {"media_dir": str(folder / "raw" / "media")} if kind == "photos" else {}
    make_shards(
        make_photos(folder / "raw", num_samples) if kind == "photos" else make_toy_dataset(folder / "raw", num_samples),
        server.url(kind),
        processor=str(folder / "processor"),
        samples_per_shard=SAMPLES_PER_SHARD,
        workers=2,
        store=server.options,
        **settings,
    )


class Stages:
    """Seconds on the clock and of this thread's processor, by stage; what a stage calls is not counted twice."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._inner: list[tuple[float, float]] = [(0.0, 0.0)]

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what is done within."""
        begin, cpu = time.perf_counter(), time.process_time()
        self._inner.append((0.0, 0.0))
        try:
            yield
        finally:
            spent, spent_cpu = time.perf_counter() - begin, time.process_time() - cpu
            inner, inner_cpu = self._inner.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - inner
            self.cpu[name] = self.cpu.get(name, 0.0) + spent_cpu - inner_cpu
            outer, outer_cpu = self._inner[-1]
            self._inner[-1] = (outer + spent, outer_cpu + spent_cpu)

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Count a function's calls as a stage."""
        function = getattr(owner, attribute)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return function(*args, **kwargs)

        setattr(owner, attribute, watched)


def _watch_all(stages: Stages) -> None:
    """Find where the parts of a start are called, so that the package itself needs no stop-watch."""
    from vlm_stream.plan import planner
    from vlm_stream.storage import reader
    from vlm_stream.stream import dataset, datasets, pipeline, planning

    stages.watch(datasets, "load_manifest", "manifest")
    stages.watch(planning, "OpenDatasets", "open datasets")
    stages.watch(dataset, "open_planner", "open planner")
    stages.watch(dataset, "Encoder", "encoder")
    stages.watch(datasets.OpenDatasets, "prefetch", "indexes")
    stages.watch(planner, "plan_window", "plan")
    stages.watch(planner, "next_horizon", "plan")
    stages.watch(reader.SpanReader, "_launch", "ask for data")
    stages.watch(reader.SpanReader, "_finish", "wait for data")
    stages.watch(pipeline, "_finish", _ENCODE)


def first_batch(kind: str, folder: Path, url: str, store: StoreOptions, seed: int) -> dict[str, Any]:
    """Start once, in a process that has done nothing else; return what it took."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder / "processor")
    stages = Stages()
    _watch_all(stages)
    with stages.stage("other"):
        loader = StreamLoader(url, processor=processor, pack_size=PACK_SIZE[kind], store=store, seed=seed, epochs=None)
        batches = iter(loader)
        next(batches)
    first = [dict(clock) for clock in (stages.seconds, stages.cpu)]
    encodes = []
    for _ in range(LATER_BATCHES):
        before = stages.seconds[_ENCODE], stages.cpu[_ENCODE]
        next(batches)
        encodes.append((stages.seconds[_ENCODE] - before[0], stages.cpu[_ENCODE] - before[1]))
    batches.close()
    seconds, cpu = (
        {"stages": clock, "first": sum(clock.values()), "encode": statistics.median(encode)}
        for clock, encode in zip(first, zip(*encodes, strict=True), strict=True)
    )
    return {"seconds": seconds, "cpu": cpu}


def measure(kind: str, folder: Path, server: S3Server) -> list[dict[str, Any]]:
    """Start several times, each in its own process and with its own seed: first batches differ in what they hold."""
    command = [sys.executable, __file__, "--child", kind, str(folder), server.url(kind), server.endpoint]
    environment = os.environ | server.environment
    return [
        json.loads(subprocess.run([*command, str(seed)], env=environment, check=True, stdout=subprocess.PIPE).stdout)
        for seed in range(REPEATS)
    ]


def report(kind: str, runs: list[dict[str, Any]]) -> None:
    """Print the medians of some starts."""
    for clock, name in (("seconds", "on the clock"), ("cpu", "of processor time")):
        firsts, encodes = ([run[clock][key] for run in runs] for key in ("first", "encode"))
        ratio = statistics.median(first / encode for first, encode in zip(firsts, encodes, strict=True))
        print(
            f"  {kind}: first batch {statistics.median(firsts):.2f} s {name} ({min(firsts):.2f} to {max(firsts):.2f}), "
            f"one batch encoded {statistics.median(encodes):.3f} s: {ratio:.1f}x"
        )
    for stage in runs[0]["seconds"]["stages"]:
        seconds, cpu = (statistics.median(run[clock]["stages"].get(stage, 0.0) for run in runs) for clock in runs[0])
        print(f"    {stage:18s} {seconds:6.3f} s   processor {cpu:6.3f} s")


def start(folder: Path, kinds: tuple[str, ...] = ("photos", "toy")) -> None:
    """First batch from a 1,000-shard dataset on S3, against encoding one batch."""
    from tests.servers import S3Server

    with S3Server(folder / "s3") as server:
        os.environ.update(server.environment)
        for kind in kinds:
            make_data(kind, folder / kind, server)
            report(kind, measure(kind, folder / kind, server))


def _child(kind: str, folder: str, url: str, endpoint: str, seed: str) -> None:
    import torch

    torch.set_num_threads(1)  # as in a worker
    store = StoreOptions(endpoint=endpoint, region="us-east-1", allow_http=True)
    print(json.dumps(first_batch(kind, Path(folder), url, store, int(seed))))


def main() -> None:
    """Measure the kinds of data that were named, or both."""
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:])
        return
    folder = Path(tempfile.mkdtemp(prefix="vlm-stream-bench-"))
    try:
        start(folder, tuple(sys.argv[1:]) or ("photos", "toy"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
