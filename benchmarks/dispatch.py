"""What a few expensive batches cost: wall time against work divided by workers.

    python benchmarks/dispatch.py [heavy] [lognormal] [clips] [kills]

`heavy`: 4 % of the batches take 1 s, the others 20 ms. `lognormal`: sigma 1.2 around 50 ms. Both sleep in
`collate_fn`, 8 workers; a batch's cost follows the length of its text, which the index knows. Times run from the first
batch to the last: starting processes is not counted. `clips`: one sample in 25 is a clip of 5 min of which 8 frames
are read, the others are images; local, 2 workers, with tables of the clips and without, in turns. `kills`: 4 workers,
one of which is killed or stopped at random, 50 times; the batches are compared with those of an undisturbed run. Real
clips beside other loaders: `python -m benchmarks.peers`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlm_stream import StreamLoader, VLMStream, make_shards

SECONDS_PER_CHARACTER = 1e-4
NUM_BATCHES = 1200
WORKERS = 8


def sleep_by_text(rows: list[Any], _processor: Any) -> dict[str, Any]:
    """Sleep as long as the sample's text says."""
    (sample,) = rows
    text = bytes(sample.members["json"])
    time.sleep(len(text) * SECONDS_PER_CHARACTER)
    return {"seconds": len(text) * SECONDS_PER_CHARACTER}


def make_texts(folder: Path, seconds: list[float]) -> Path:
    """Write conversations whose lengths are the times that their batches take."""
    source = folder / "texts.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for number, cost in enumerate(seconds):
            text = "word " * int(cost / SECONDS_PER_CHARACTER / 5)
            turns = [{"from": "human", "value": f"{number}"}, {"from": "gpt", "value": text}]
            file.write(json.dumps({"id": str(number), "conversations": turns}) + "\n")
    meta = folder / "meta.json"
    columns = {"messages": "conversations"}
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    meta.write_text(json.dumps({"texts": {"file_name": source.name, "columns": columns, "tags": tags}}))
    make_shards(meta, folder / "shards")
    return folder / "shards"


def measure_sleeps(name: str, seconds: list[float]) -> None:
    """Print wall time over work per worker."""
    with tempfile.TemporaryDirectory() as folder:
        shards = make_texts(Path(folder), seconds)
        loader = StreamLoader(
            shards, processor=None, mode="plain", collate_fn=sleep_by_text, num_workers=WORKERS, bad_budget=None
        )
        with loader:
            work, begin = 0.0, None
            for batch in loader:
                begin = begin or time.perf_counter()
                work += batch["seconds"]
            assert begin is not None
            wall = time.perf_counter() - begin
            twice = int(loader.metrics()["built_twice"])
    ratio = wall / (work / WORKERS)
    print(f"{name}: {wall:.2f} s for {work:.1f} s of work, {ratio:.3f} of work / workers; {twice} batches built twice")


def measure_clips() -> None:
    """Print the seconds of an epoch with tables of clips and without."""
    from benchmarks.video import CASES, make_clip, write_records
    from vlm_stream.testing import build_processor, make_jpeg

    processor = build_processor("qwen2_5_vl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [make_clip(folder, CASES["5 min"])] + [folder / f"{number}.jpg" for number in range(24)]
        for number, image in enumerate(files[1:]):
            image.write_bytes(make_jpeg(480, 640, seed=number))
        make_shards(write_records(folder, files * 8), folder / "with", samples_per_shard=20)
        shutil.copytree(folder / "with", folder / "without")
        for tables in (folder / "without").glob("*.clips.bin"):
            tables.unlink()
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        for which in [*seconds] * 3:
            loader = StreamLoader(
                folder / which, processor=processor, mode="plain", batch_size=1, max_frames=8, num_workers=2
            )
            with loader:
                batches = iter(loader)
                next(batches)
                begin = time.perf_counter()
                assert sum(1 for _ in batches) == len(files) * 8 - 1
                seconds[which].append(time.perf_counter() - begin)
    with_tables, without = (statistics.median(each) for each in seconds.values())
    print(f"clips: {with_tables:.2f} s with tables, {without:.2f} s without, {without / with_tables:.1f} times as long")


def measure_kills(num_kills: int = 50) -> None:
    """Print what came otherwise, how long the loader waited, and what was left behind."""
    with tempfile.TemporaryDirectory() as name:
        draw = random.Random(0)
        shards = make_texts(Path(name), [0.2 + 0.2 * draw.random() for _ in range(NUM_BATCHES // 2)])
        options: dict[str, Any] = {"processor": None, "mode": "plain", "collate_fn": sleep_by_text, "with_refs": True}
        expected = [planned.blueprint.rows[0][0].key for planned in _planned(shards, options)]
        loader = StreamLoader(shards, num_workers=4, max_restarts=10 * num_kills, **options)
        before, pids = len(list(Path("/dev/shm").iterdir())), set()
        came, waits, how = [], [], {"killed": 0, "stopped": 0}
        batches = iter(loader)
        every = len(expected) // (num_kills + 2)
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            waits.append(time.perf_counter() - begin)
            came.append(batch["refs"][0][0][2])
            workers = loader.worker_pids()
            pids.update(workers)
            if len(came) % every == 0 and sum(how.values()) < num_kills and workers:
                sign = draw.choice(["killed", "stopped"])
                os.kill(draw.choice(workers), signal.SIGKILL if sign == "killed" else signal.SIGSTOP)
                how[sign] += 1
        restarts, twice = (int(loader.metrics()[name]) for name in ("worker_restarts", "built_twice"))
        loader.close()
        time.sleep(1)
        orphans = sum(Path(f"/proc/{pid}").exists() for pid in pids)
        waits.sort()
        print(
            f"kills: {how}, {len(came)} of {len(expected)} batches, "
            f"{'in order' if came == expected else 'NOT THE SAME'}; a batch takes 0.2 to 0.4 s; waits: median "
            f"{waits[len(waits) // 2]:.2f} s, 99 % {waits[int(len(waits) * 0.99)]:.2f} s, longest after the start "
            f"{waits[-2]:.2f} s; {restarts} workers replaced, {twice} batches built twice, {orphans} orphans, "
            f"{len(list(Path('/dev/shm').iterdir())) - before} new files in /dev/shm"
        )


def _planned(shards: Path, options: dict[str, Any]) -> Any:
    stream = VLMStream(shards, **options)
    return stream.plan().blueprints(stream.world)


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["heavy", "lognormal", "clips", "kills"]
    rng = random.Random(0)
    if "heavy" in chosen:
        measure_sleeps("heavy", [1.0 if rng.random() < 0.04 else 0.02 for _ in range(NUM_BATCHES)])
    if "lognormal" in chosen:
        measure_sleeps("lognormal", [0.05 * rng.lognormvariate(0, 1.2) for _ in range(NUM_BATCHES)])
    if "clips" in chosen:
        measure_clips()
    if "kills" in chosen:
        measure_kills()
