"""Compact against full pixels: one worker, from shards to batches in the trainer's process.

Run by hand: `python benchmarks/pixels.py` (about three minutes; `--quick` for one). Each measurement is a fresh process
with one worker process, and the two ways take turns; rates are those of the best round (other processes only slow
them down), seconds of processor time are the worker's own. Read the ratios.
Prints samples/s and bytes for images of two sizes and for a clip, where a sample's time goes, and the cost of
`finish_pixels`. How far a builder is from its limit (decoding and resizing alone) is in `waste.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.encode import photo
from vlm_stream import StreamLoader
from vlm_stream.convert import make_shards
from vlm_stream.encode import EncodeConfig, Encoder
from vlm_stream.media import decode_image
from vlm_stream.pixels import CompactPath, finish_pixels
from vlm_stream.pixels.compact import view_image
from vlm_stream.testing import build_processor, make_mp4

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS = ("full", "compact")
PIXELS = ("pixel_values", "pixel_values_videos")


def build_dataset(folder: Path, media: dict[str, bytes], num_samples: int, medium: str) -> Path:
    """Write shards in which each sample shows one of the media."""
    folder.mkdir()
    for name, data in media.items():
        (folder / name).write_bytes(data)
    names = sorted(media)
    with (folder / "data.jsonl").open("w") as lines:
        for number in range(num_samples):
            turns = [
                {"role": "user", "content": f"<{medium}>What is in this picture?"},
                {"role": "assistant", "content": "It is a blurred field of many colours. " * 4},
            ]
            lines.write(json.dumps({"messages": turns, f"{medium}s": [names[number % len(names)]]}) + "\n")
    (folder / "meta.json").write_text(json.dumps({"all": {"file_name": "data.jsonl", "media_dir": "."}}))
    make_shards(folder / "meta.json", folder / "shards", samples_per_shard=num_samples)
    return folder / "shards"


def open_processor() -> Any:
    """Return Qwen2.5-VL's processor with its own limits."""
    return build_processor("qwen2_5_vl", video={"cap_pixels_per_frame": False})


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_child(shards: str, way: str, batch_size: int) -> None:
    """Stream all batches of a dataset from one worker and print what it took."""
    loader = StreamLoader(
        shards,
        processor=open_processor(),
        mode="plain",
        batch_size=batch_size,
        num_workers=1,
        pixels=way,
        fps=3.2,
        max_frames=32,
    )
    begin = cpu = 0.0
    num_samples = num_bytes = 0
    numbers: dict[str, float] = {}
    for number, batch in enumerate(loader):
        pid = loader.worker_pids()[0]
        if number == 0:  # the first batch pays for everything that is built once
            begin, cpu = time.perf_counter(), _cpu_seconds(pid)
            continue
        num_samples += len(batch["input_ids"])
        num_bytes += sum(batch[key].nbytes for key in PIXELS if key in batch)
        staged = [batch[key].clone() for key in PIXELS if key in batch]  # as a trainer pins them for its device
        numbers = {"wall": time.perf_counter() - begin, "cpu": _cpu_seconds(pid) - cpu, "staged": len(staged)}
        numbers |= {"worker_mb": _status(pid, "VmHWM"), "trainer_mb": _status(os.getpid(), "VmHWM")}
    stages = {key: value for key, value in loader.metrics().items() if key.endswith("_s_per_batch")}
    print(json.dumps(numbers | {"samples": num_samples, "bytes": num_bytes, "batch_size": batch_size} | stages))


def measure(shards: Path, batch_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the best figures of each way; the ways take turns."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            command = [sys.executable, __file__, "--child", str(shards), way, str(batch_size)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            runs[way].append(json.loads(out.splitlines()[-1]))
    best = {}
    for way, results in runs.items():
        quickest = min(results, key=lambda run: run["wall"] / run["samples"])
        best[way] = quickest | {
            "rate": quickest["samples"] / quickest["wall"],
            "cpu_ms": min(run["cpu"] / run["samples"] for run in results) * 1e3,
            "mb_each": quickest["bytes"] / quickest["samples"] / 1e6,
        }
    return best


def report(title: str, best: dict[str, dict[str, float]]) -> None:
    """Print one table of both ways and their ratio."""
    print(f"\n{title}")
    print(f"  {'':34}{'full':>10}{'compact':>10}{'ratio':>8}")
    rows = [
        ("samples/s of a worker", "rate", False),
        ("worker's processor time, ms a sample", "cpu_ms", True),
        ("pixels from worker to trainer, MB", "mb_each", True),
        ("peak memory of the worker, MB", "worker_mb", True),
        ("peak memory of the trainer, MB", "trainer_mb", True),
    ]
    for name, key, less_is_better in rows:
        full, compact = best["full"][key], best["compact"][key]
        ratio = full / compact if less_is_better else compact / full
        print(f"  {name:37}{full:>8.2f}{compact:>10.2f}{ratio:>7.2f}x")
    for stage in ("fetch", "encode", "collate"):
        values = [best[way][f"{stage}_s_per_batch"] / best[way]["batch_size"] * 1e3 for way in WAYS]
        print(f"    {stage + ', ms a sample':35}{values[0]:>8.2f}{values[1]:>10.2f}")


def milliseconds(function: Callable[[], Any], repetitions: int = 30) -> str:
    """Return the best and the median milliseconds of a call."""
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e3)
    return f"{min(times):8.2f}{median(times):9.2f}"


def report_parts(data: bytes) -> None:
    """Print where a sample's time goes on one thread, and what finishing costs."""
    processor = open_processor()
    path = CompactPath(processor)
    image = decode_image(data)
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    height, width = image.size[1], image.size[0]
    plain, encoder = (Encoder(processor, EncodeConfig(pixels=way)) for way in WAYS)
    chat = [
        {"role": "user", "content": [{"type": "image", "image": data}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A blur."}]},
    ]
    sample = encoder.encode(chat, {})
    tokens = text.replace("<|image_pad|>", "<|image_pad|>" * int(sample["image_grid_thw"].prod() // 4))
    print(f"\nWhere the time goes, {width}x{height}, one thread, ms (best, median)")

    parts: dict[str, Callable[[], Any]] = {
        "decode (Pillow)": lambda: decode_image(data),
        "to a tensor: Arrow, no copy": lambda: view_image(image),
        "to a tensor: np.array": lambda: torch.from_numpy(np.array(image)),
        "image part, full": lambda: processor.image_processor(images=[image], return_tensors="pt"),
        "image part, compact": lambda: path.processor.image_processor(images=[image], return_tensors="pt"),
        "text of as many tokens": lambda: processor(text=[tokens], return_tensors="pt"),
        "encode, full": lambda: plain.encode(chat, {}),
        "encode, compact": lambda: encoder.encode(chat, {}),
        "finish_pixels on this CPU, bfloat16": lambda: finish_pixels(sample),
        "finish_pixels on this CPU, float32": lambda: finish_pixels(sample, dtype=torch.float32),
    }
    for name, function in parts.items():
        function()
        print(f"  {name:44}{milliseconds(function)}")


def main() -> None:
    """Measure everything in one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer samples")
    parser.add_argument("--child", nargs=3, metavar=("SHARDS", "WAY", "BATCH_SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child[0], arguments.child[1], int(arguments.child[2]))
        return
    torch.set_num_threads(1)
    rounds, num_images, num_clips = (1, 80, 3) if arguments.quick else (3, 160, 5)
    print(f"load before the run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        for height, width in ((768, 1024), (480, 640)):
            media = {f"{n}.jpg": photo(height, width, n) for n in range(16)}
            shards = build_dataset(Path(folder) / f"{width}", media, num_images, "image")
            report(f"Images, {width}x{height}, {len(media['0.jpg'])} bytes", measure(shards, 4, rounds))
        clip = make_mp4(num_frames=240, height=720, width=1280, fps=24, gop=24)
        shards = build_dataset(Path(folder) / "clips", {"0.mp4": clip}, num_clips, "video")
        report("Clips, 32 frames of 10 s of 720p", measure(shards, 1, min(rounds, 2)))
    report_parts(photo(768, 1024, 0))
    print(f"\nload after the run: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
