"""What one builder wastes: Python between the C, copies of memory, page faults, and how far it is from the bare limit.

    python benchmarks/waste.py            # some four minutes; --quick: one

Everything is measured in one run, on one thread, as processor time: of the mixtures of `peers/data.py`, packed to 8,192
tokens, shards on a local disk. Four tables:

* stages: milliseconds a sample of each part of a builder without what it calls, for text (tokenised again, and as
  conversion has kept it) and for the image mixture (full and compact pixels); `threads` run beside it (files);
* copies: every operation of torch, numpy and Pillow that writes 64 kB or more while one batch of pictures is built in a
  process of its own and sent, by stage; and what of it the receiver copies;
* faults: page faults a batch of a worker and of the trainer, and the trainer's processor time a batch;
* limit: the pictures of the mixture decoded and resized in C alone, against the builder that makes batches of them.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import vlm_stream.build.builder as builder_room
import vlm_stream.build.rows as rows_room
import vlm_stream.collate.media as media_room
import vlm_stream.encode.encoder as encoder_room
import vlm_stream.media.image as image_room
import vlm_stream.pixels.compact as compact_room
from benchmarks.peers.data import _WORDS, make_raw
from vlm_stream import StreamLoader
from vlm_stream.allocator import keep_freed_memory
from vlm_stream.blocks import BlockReader, offer_blocks
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
    (rows_room, "read_tokens", "JSON of kept text alone"),
    (rows_room, "unpack_text", "kept text"),
    (encoder_room.Encoder, "encode", "encode"),
    (encoder_room.Encoder, "encode_text", "encode"),
    (encoder_room, "check_media_tokens", "check media tokens"),
    (encoder_room, "render_chat", "chat template"),
    (encoder_room, "label_answers", "labels"),
    (load_room, "decode_image", "decode"),
    (Qwen2VLImageProcessor, "preprocess", "image part, but what follows"),
    (TorchvisionBackend, "resize", "resize"),
    (TorchvisionBackend, "rescale_and_normalize", "normalise"),
    (Qwen2VLImageProcessor, "patchify", "cut patches"),
    (compact_room, "cut_patches", "cut patches"),
    (encoder_room.Encoder, "call", "processor (text, pixels)"),
    (rows_room.RowBuilder, "collate", "join"),
    (media_room, "join_rows", "join: media"),
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


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


class Copies(TorchDispatchMode):
    """Notes each large write, by stage and operation."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        self._stages = stages

    def note(self, operation: str, num_bytes: int) -> None:
        """Count a write that is large."""
        if num_bytes >= LARGE_BYTES:
            entry = self.found[self._stages.stack[-1], operation]
            entry[0] += 1
            entry[1] += num_bytes

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        places = {each.untyped_storage().data_ptr() for each in tensors_of((args, kwargs))}
        makes_none = any(word in str(function) for word in ("empty", "set_."))
        for each in () if makes_none else tensors_of(out):
            if function._schema.is_mutable or each.untyped_storage().data_ptr() not in places:
                self.note(str(function), each.nbytes)
        return out

    def of_numpy(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of numpy whose result is noted where it is not its argument's memory."""

        def noting(value: Any, *args: Any, **kwargs: Any) -> Any:
            out = function(value, *args, **kwargs)
            if not (isinstance(value, np.ndarray) and np.may_share_memory(value, out)):
                self.note(f"numpy.{function.__name__}", out.nbytes)
            return out

        return noting


def count_copies(shards: str, processor: Any, pixels: str, connection: Any) -> None:
    """Build one batch as a worker does, and send it with what was written for it."""
    torch.set_num_threads(1)
    blocks = offer_blocks()
    blocks.is_welcome = True
    loader = open_loader(shards, processor, pixels=pixels)
    stages = Stages()
    copies = Copies(stages)
    results = Reading.results

    def noting_results(reading: Any) -> Any:
        fetched = [future.result().data for _, future in reading._requests]
        places = [(np.frombuffer(data, np.uint8).ctypes.data, len(data)) for data in fetched]
        for _, size in places:
            copies.note("read from the store", size)
        found = results(reading)
        for members in found:
            for view in members.values():
                at = np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0
                if not any(begin <= at < begin + size for begin, size in places):
                    copies.note("cut members", len(view))
        return found

    def noting_decode(*args: Any, **kwargs: Any) -> Any:
        image = decode(*args, **kwargs)
        copies.note("Pillow: decode", 4 * image.width * image.height)
        return image

    def noting_file(data: Any) -> Any:
        file = io.BytesIO(data)
        if not np.may_share_memory(np.frombuffer(file.getbuffer(), np.uint8), np.frombuffer(data, np.uint8)):
            copies.note("io.BytesIO", len(data))
        return file

    batches = iter(loader)
    for _ in range(8):  # until kept text is trusted
        next(batches)
    decode = load_room.decode_image
    with ExitStack() as stack:
        for owner, name, new in (
            (Reading, "results", noting_results),
            (load_room, "decode_image", noting_decode),
            (image_room, "io", SimpleNamespace(BytesIO=noting_file)),
            (np, "ascontiguousarray", copies.of_numpy(np.ascontiguousarray)),
            (np, "array", copies.of_numpy(np.array)),
            (np, "stack", copies.of_numpy(np.stack)),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(stages.watching())
        stack.enter_context(copies)
        batch = next(batches)
        data = multiprocessing.reduction.ForkingPickler.dumps(dict(batch))
    connection.send_bytes(data)
    connection.send((dict(copies.found), len(data)))
    connection.recv()  # the receiver has read the blocks


def report_copies(shards: str, processor: Any, pixels: str) -> None:
    """Print what is written for one batch, in its builder and where it arrives."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=count_copies, args=(shards, processor, pixels, there), daemon=True)
    child.start()
    there.close()
    reader = BlockReader(child.pid)
    stages = Stages()
    stages.stack = ["trainer"]
    received = Copies(stages)
    with received:
        data = here.recv_bytes()
        batch = multiprocessing.reduction.ForkingPickler.loads(data)
    found, num_sent = here.recv()
    received.note("read from the pipe", num_sent)
    here.send(None)
    child.join()
    reader.close()
    num_bytes = sum(value.nbytes for value in tensors_of(batch))
    found |= received.found
    total = sum(size for _, size in found.values())
    print(f"\ncopies, {pixels} pixels: {total / 1e6:.1f} MB written for a batch of {num_bytes / 1e6:.1f} MB")
    for (stage, operation), (number, size) in found.items():
        print(f"  {stage:28}{operation:46}{number:5} x {size / number / 1e6:8.3f} MB = {size / 1e6:8.2f} MB")


def report_faults(shards: str, processor: Any, pixels: str, num_batches: int) -> None:
    """Print page faults of worker and trainer, and what the trainer's process does, a batch."""
    loader = open_loader(shards, processor, pixels=pixels, num_workers=1)
    batches = iter(loader)
    for _ in range(num_batches):  # until the plan is as far ahead as it goes
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

    targets = [list(smart_resize_image(*decode_image(data).size[::-1], *limits)) for data in pictures]

    def bare() -> None:
        for data, target in zip(pictures, targets, strict=True):
            image = view_image(decode_image(data))[None]
            resize(image, target, interpolation=InterpolationMode.BICUBIC, antialias=True)

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
    parser.add_argument("--only", choices=("stages", "copies", "faults", "limit"), help="one of the tables")
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
                report_faults(shards[data], processor, pixels, 40 if data == "images" else 500)
        keep_freed_memory()  # as workers do, and the trainer does not
        if only in (None, "stages"):
            again = report_stages("text, tokenised again", shards["bare"], processor, num_texts // 3)
            print(f"  {again / report_stages('text, kept', shards['kept'], processor, num_texts):.2f} times faster")
            for pixels in ("full", "compact"):
                report_stages(f"images, {pixels}", shards["images"], processor, 2 * num_images, pixels=pixels)
        if only in (None, "copies"):
            report_copies(shards["images"], processor, "full")
            report_copies(shards["images"], processor, "compact")
        if only in (None, "limit"):
            report_limit(shards["images"], processor, num_images, rounds)


if __name__ == "__main__":
    main()
