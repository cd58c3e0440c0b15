"""What a few expensive batches cost: wall time against work divided by workers.

    python benchmarks/dispatch.py [heavy] [lognormal] [media] [kills]

`heavy`: 4 % of the batches take 1 s, the others 20 ms. `lognormal`: sigma 1.2 around 50 ms. Both sleep in `collate_fn`,
8 workers; a batch's cost follows the length of its text, which the index knows. `media`: a real mixture of photographs
and clips of 5 to 300 s, decoded and encoded for Qwen2.5-VL by 2 workers, against torch's DataLoader on the same stream,
which gives batches to workers in turn. Times run from the first batch to the last: starting processes is not counted.
`kills`: 4 workers, one of which is killed or stopped at random, 50 times; the batches are compared with those of an
undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
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
    print(f"{name}: {wall:.2f} s for {work:.1f} s of work, {wall / (work / WORKERS):.3f} of work / workers")


def make_media(folder: Path) -> tuple[Path, Path]:
    """Write photographs and clips; return the shards and the processor."""
    from benchmarks.pixels import photo
    from vlm_stream.testing import build_processor, make_mp4

    draw = random.Random(0)
    records = []
    for number in range(8):
        (folder / f"{number}.jpg").write_bytes(photo(768, 1024, number))
    lengths = [5, 5, 10, 10, 20, 30, 60, 120, 300]
    for seconds in sorted(set(lengths)):
        (folder / f"{seconds}.mp4").write_bytes(make_mp4(num_frames=seconds * 10, height=240, width=320, fps=10))
    for number in range(240):
        is_clip = draw.random() < 0.2
        medium = f"{draw.choice(lengths)}.mp4" if is_clip else f"{draw.randrange(8)}.jpg"
        kind = "video" if is_clip else "image"
        turns = [
            {"role": "user", "content": f"<{kind}>What is this?"},
            {"role": "assistant", "content": f"Number {number}."},
        ]
        records.append({"messages": turns, f"{kind}s": [medium]})
    (folder / "data.json").write_text(json.dumps(records))
    meta = folder / "meta.json"
    columns = {"messages": "messages", "images": "images", "videos": "videos"}
    meta.write_text(json.dumps({"mixed": {"file_name": "data.json", "media_dir": str(folder), "columns": columns}}))
    processor = folder / "processor"
    build_processor("qwen2_5_vl").save_pretrained(processor)
    make_shards(meta, folder / "shards", processor=str(processor))
    return folder / "shards", processor


def measure_media() -> None:
    """Print wall time of both ways, in turn."""
    from torch.utils.data import DataLoader

    with tempfile.TemporaryDirectory() as name:
        shards, processor = make_media(Path(name))
        options: dict[str, Any] = {"processor": str(processor), "mode": "plain", "max_frames": 32}

        def ours() -> Any:
            return StreamLoader(shards, num_workers=2, **options)

        def in_turn() -> Any:
            return DataLoader(VLMStream(shards, **options), batch_size=None, num_workers=2)

        walls: dict[str, list[float]] = {"dispatched": [], "in turn": []}
        for _ in range(3):
            for way, make in (("dispatched", ours), ("in turn", in_turn)):
                batches = iter(make())
                next(batches)
                begin = time.perf_counter()
                count = sum(1 for _ in batches)
                walls[way].append(time.perf_counter() - begin)
                del batches
        ours_s, theirs_s = (sorted(walls[way])[1] for way in ("dispatched", "in turn"))
        print(f"media: {count} batches, {ours_s:.1f} s against {theirs_s:.1f} s in turn: {ours_s / theirs_s:.3f}")


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
        restarts = int(loader.metrics()["worker_restarts"])
        loader.close()
        time.sleep(1)
        orphans = sum(Path(f"/proc/{pid}").exists() for pid in pids)
        waits.sort()
        print(
            f"kills: {how}, {len(came)} of {len(expected)} batches, "
            f"{'in order' if came == expected else 'NOT THE SAME'}; a batch takes 0.2 to 0.4 s; waits: median "
            f"{waits[len(waits) // 2]:.2f} s, 99 % {waits[int(len(waits) * 0.99)]:.2f} s, longest after the start "
            f"{waits[-2]:.2f} s; {restarts} workers replaced, {orphans} orphans, "
            f"{len(list(Path('/dev/shm').iterdir())) - before} new files in /dev/shm"
        )


def _planned(shards: Path, options: dict[str, Any]) -> Any:
    stream = VLMStream(shards, **options)
    return stream.plan().blueprints(stream.world)


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["heavy", "lognormal", "media", "kills"]
    rng = random.Random(0)
    if "heavy" in chosen:
        measure_sleeps("heavy", [1.0 if rng.random() < 0.04 else 0.02 for _ in range(NUM_BATCHES)])
    if "lognormal" in chosen:
        measure_sleeps("lognormal", [0.05 * rng.lognormvariate(0, 1.2) for _ in range(NUM_BATCHES)])
    if "media" in chosen:
        measure_media()
    if "kills" in chosen:
        measure_kills()
