"""What one builder wastes: Python between the C, page faults, and how far it is from the bare limit.

    python benchmarks/waste.py            # some four minutes; --quick: one

Everything is measured in one run, on one thread, as processor time: of the mixtures of `peers/data.py`, packed to 8,192
tokens, shards on a local disk. Three tables:

* stages: milliseconds a sample of each part of a builder without what it calls, for text (tokenised again, and as
  conversion has kept it) and for the image mixture (full and compact pixels); `threads` run beside it (files);
* faults: page faults a batch of a worker and of the trainer, and the trainer's processor time a batch;
* limit: the pictures of the mixture decoded and resized in C alone, against the builder that makes batches of them.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import vlm_stream.build.builder as builder_room
import vlm_stream.build.rows as rows_room
import vlm_stream.encode.encoder as encoder_room
from benchmarks.peers.data import _WORDS, make_raw
from vlm_stream import StreamLoader
from vlm_stream.allocator import keep_freed_memory
from vlm_stream.convert import make_shards
from vlm_stream.iteration import Plan
from vlm_stream.media import decode_image
from vlm_stream.pixels.compact import view_image
from vlm_stream.storage.reader import Reading
from vlm_stream.testing import build_processor
from vlm_stream.tokens import smart_resize_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

load_room = import_module("vlm_stream.encode.load_media")  # a function of the room has the same name
PACK = 8192
LARGE_BYTES = 1 << 16
STAGES = (
    (Plan, "blueprint", "plan"),
    (builder_room.Builder, "begin", "ask for bytes"),
    (Reading, "results", "check bytes, cut members"),
    (rows_room, "read_sample", "JSON to conversation"),
    (rows_room.RowBuilder, "_kept", "kept text"),
    (encoder_room.Encoder, "encode", "encode"),
    (encoder_room, "render_chat", "chat template"),
    (encoder_room, "label_answers", "labels"),
    (load_room, "decode_image", "decode"),
    (encoder_room.Encoder, "_make_pixels", "pixels"),
    (encoder_room.Encoder, "call", "processor (text, pixels)"),
    (rows_room.RowBuilder, "collate", "join"),
    (builder_room.Builder, "finish", "builder"),
)


class Stages:
    """Processor time of this thread by stage; what a stage calls is not its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.stack = ["loop"]
        self._since = time.thread_time()

    def switch(self) -> None:
        """Give the time since the last change to the stage on top."""
        now = time.thread_time()
        self.seconds[self.stack[-1]] += now - self._since
        self._since = now

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """Return a function whose time counts for a stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self.stack.append(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self.stack.pop()

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time all stages while the block runs."""
        with ExitStack() as stack:
            for owner, name, stage in STAGES:
                stack.enter_context(mock.patch.object(owner, name, self.timed(getattr(owner, name), stage)))
            yield


def open_processor(text: str) -> Any:
    """Return Qwen2.5-VL's processor with a tokenizer that makes 1.3 tokens of a word, as those of real models do."""
    processor = build_processor("qwen2_5_vl")
    tokenizer = processor.tokenizer
    for size in range(280, len(tokenizer), 4):
        tokenizer = processor.tokenizer.train_new_from_iterator([text], size, show_progress=False)
        if len(tokenizer(text)["input_ids"]) <= 1.3 * len(text.split()):
            break
    parts = {name: getattr(processor, name) for name in ("image_processor", "video_processor", "chat_template")}
    return type(processor)(tokenizer=tokenizer, **parts)


def prepare(folder: Path, processor: Any, num_samples: int) -> dict[str, str]:
    """Write the image mixture, and its texts alone with and without the tokens that conversion keeps."""
    images = make_raw(folder / "raw", "images", num_samples)
    texts = images.with_name("texts.jsonl")
    many = make_raw(folder / "raw", "images", 10 * num_samples).read_text().splitlines(keepends=True)
    texts.write_text("".join(line for line in many if '"images"' not in line))
    shards = {}
    for name, raw, keeps in (("images", images, True), ("kept", texts, True), ("bare", texts, False)):
        (folder / f"{name}.json").write_text(f'{{"all": {{"file_name": "{raw}", "media_dir": "{raw.parent}"}}}}')
        shards[name] = str(folder / name)
        if not Path(shards[name]).exists():
            make_shards(folder / f"{name}.json", shards[name], processor=processor if keeps else None)
    return shards


def open_loader(shards: str, processor: Any, **options: Any) -> StreamLoader:
    """Return a loader of packs."""
    return StreamLoader(shards, processor=processor, mode="packed", pack_size=PACK, epochs=None, **options)


def take(batches: Iterator[dict[str, Any]], num_samples: int) -> tuple[int, int]:
    """Take batches of so many samples, whose positions begin at 0; return samples and batches."""
    found = number = 0
    while found < num_samples:
        batch = next(batches)
        found += int((batch["position_ids"][0] == 0).sum())
        number += 1
    return found, number


def report_stages(title: str, shards: str, processor: Any, num_samples: int, **options: Any) -> float:
    """Print the time of each stage; return milliseconds a sample, of all threads, measured without the stages."""
    batches = iter(open_loader(shards, processor, **options))
    take(batches, num_samples // 4)
    begin = time.process_time()
    found, _ = take(batches, num_samples)
    whole = (time.process_time() - begin) / found * 1e3
    stages, begin = Stages(), time.process_time()
    with stages.watching():
        found, _ = take(batches, num_samples)
        stages.switch()
    threads = time.process_time() - begin - sum(stages.seconds.values())
    print(f"\n{title}: {whole:.3f} ms a sample")
    for stage, seconds in sorted({**stages.seconds, "threads": threads}.items(), key=lambda each: -each[1]):
        print(f"  {stage:28}{seconds / found * 1e3:9.3f}")
    return whole


def report_faults(shards: str, processor: Any, pixels: str, num_batches: int) -> None:
    """Print page faults of worker and trainer, and what the trainer's process does, a batch."""
    loader = open_loader(shards, processor, pixels=pixels, num_workers=1)
    batches = iter(loader)
    for _ in range(16):
        next(batches)
    (pid,) = loader.worker_pids()

    def look() -> dict[str, float]:
        worker = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        clocks = {each.name: time.pthread_getcpuclockid(each.ident) for each in threading.enumerate()}
        faults = {"worker": int(worker[7]), "trainer": resource.getrusage(resource.RUSAGE_SELF).ru_minflt}
        return {**faults, "process": time.process_time()} | {k: time.clock_gettime(v) for k, v in clocks.items()}

    before = look()
    for _ in range(num_batches):
        next(batches)
    found = {name: (value - before.get(name, 0)) / num_batches for name, value in look().items()}
    print(
        f"  {Path(shards).name}, {pixels:8} faults of the worker {found.pop('worker'):.1f}, of the trainer "
        f"{found.pop('trainer'):.1f}; ms: " + ", ".join(f"{name} {ms * 1e3:.3f}" for name, ms in found.items())
    )
    del batches


def report_limit(shards: str, processor: Any, num_samples: int, rounds: int) -> None:
    """Print the builder's time for the pictures of the mixture beside what decoding and resizing them takes alone."""
    from torchvision.transforms.v2.functional import InterpolationMode, resize

    part = processor.image_processor
    limits = part.patch_size * part.merge_size, part.size["shortest_edge"], part.size["longest_edge"]
    pictures = [
        bytes(data)
        for batch in StreamLoader(shards, processor=None, mode="plain", shuffle=False)
        for sample in batch["samples"]
        for name, data in sample.members.items()
        if name.endswith("jpg")
    ]

    def bare() -> None:
        for data in pictures:
            image = view_image(decode_image(data))
            target = smart_resize_image(*image.shape[-2:], *limits)
            resize(image[None], list(target), interpolation=InterpolationMode.BICUBIC, antialias=True)

    ways: dict[str, Callable[[], Any]] = {"libjpeg-turbo (by Pillow), torchvision": bare}
    for pixels in ("compact", "full"):
        batches = iter(open_loader(shards, processor, pixels=pixels))
        take(batches, num_samples // 4)
        ways[f"builder, {pixels}"] = lambda batches=batches: take(batches, num_samples)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for _ in range(rounds):
        for name, function in ways.items():
            begin = time.process_time()
            done = function()
            spent[name][0] += time.process_time() - begin
            spent[name][1] += num_samples if done is None else done[0]
    # Means over several epochs: samples differ, and one batch more or less would decide otherwise.
    found = {name: seconds / number * 1e3 for name, (seconds, number) in spent.items()}
    print("\nthe limit: decode and resize alone, ms a sample of the mixture")
    for name, value in found.items():
        print(f"  {name:40}{value:9.3f}{value / next(iter(found.values())):8.2f} x")


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--only", choices=("stages", "faults", "limit"), help="one of the tables")
    parser.add_argument("--folder", type=Path, help="where data stay for the next run; by default they are removed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_images, num_texts, rounds = (100, 600, 2) if arguments.quick else (300, 3000, 4)
    processor = open_processor(" ".join(random.Random(0).choices(_WORDS, k=2000)))
    print(f"load before the run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    only = arguments.only
    with tempfile.TemporaryDirectory() as name:
        shards = prepare(arguments.folder or Path(name), processor, num_images)
        if only in (None, "faults"):
            print("\nfaults and the trainer's process, a batch")
            for data, pixels in (("kept", "full"), ("images", "full"), ("images", "compact")):
                report_faults(shards[data], processor, pixels, 20 if data == "images" else 60)
        keep_freed_memory()  # as workers do, and the trainer does not
        if only in (None, "stages"):
            again = report_stages("text, tokenised again", shards["bare"], processor, num_texts // 3)
            print(f"  {again / report_stages('text, kept', shards['kept'], processor, num_texts):.2f} times faster")
            for pixels in ("full", "compact"):
                report_stages(f"images, {pixels}", shards["images"], processor, 2 * num_images, pixels=pixels)
        if only in (None, "limit"):
            report_limit(shards["images"], processor, num_images, rounds)


if __name__ == "__main__":
    main()
