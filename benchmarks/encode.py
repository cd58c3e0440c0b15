"""Where the time of one encoding worker goes, and what our layer adds to the processor's own work.

Run by hand: `python benchmarks/encode.py`. One thread, one run, processor time (not wall time, which other processes
lengthen), best of interleaved repetitions (medians in overhead); read the ratios.
Prints three tables: overhead of `Encoder.encode`, what text that conversion has tokenised saves, labels against a
per-token loop. Where the time of a whole builder goes is in `waste.py`.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import random
import time
from collections import defaultdict
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageFilter

from vlm_stream.convert.counting import ExactCounter
from vlm_stream.encode import IGNORE, EncodeConfig, Encoder, unpack_text
from vlm_stream.encode.chat_format import Rendered
from vlm_stream.encode.label_search import find_marker, scan_markers
from vlm_stream.encode.labels import label_answers
from vlm_stream.format import FieldMap, keep_tokens, read_sample
from vlm_stream.testing import build_processor
from vlm_stream.tokens import ImageSize, MediaSizes

if TYPE_CHECKING:
    from collections.abc import Callable


def photo(height: int, width: int, seed: int = 0, quality: int = 90) -> bytes:
    """Return a JPEG with about as much detail as a photograph (0.2 bytes a pixel)."""
    rng = np.random.default_rng(seed)
    noise = Image.fromarray(rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8))
    picture = noise.resize((width, height), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(2))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def chat(num_turns: int, sentences: int, image: bool) -> list[dict[str, Any]]:
    """Return a conversation about as long as the published means; its words do not repeat each other."""
    draw = random.Random(num_turns)
    words = ["".join(draw.choices("etaoinshrdlucmfw", k=draw.randint(2, 9))) for _ in range(3000)]

    def say(num_words: int) -> dict[str, Any]:
        return {"type": "text", "text": " ".join(draw.choices(words, k=num_words))}

    turns: list[dict[str, Any]] = []
    for turn in range(num_turns):
        items = [{"type": "image", "image": "0.jpg"}] if image and turn == 0 else []
        turns.append({"role": "user", "content": [*items, say(15)]})
        turns.append({"role": "assistant", "content": [say(5 * sentences)]})
    return turns


def interleaved(functions: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Return the least seconds of each function, which noise only lengthens; they take turns."""
    times: dict[str, list[float]] = defaultdict(list)
    for function in functions.values():
        function()
    for _ in range(repetitions):
        for name, function in functions.items():
            begin = time.process_time()
            function()
            times[name].append(time.process_time() - begin)
    return {name: min(values) for name, values in times.items()}


def table(title: str, rows: list[tuple[str, ...]]) -> None:
    """Print one table."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print(f"\n{title}")
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def overhead(repetitions: int) -> None:
    """Print `encode` against decoding, rendering and calling the processor directly, in turns.

    The last two columns are what `encode` spends outside of those three, in the same calls; what reading the clock
    costs is taken off. The collector of cycles rests. Samples are kept until the clock has stopped: giving their pixels
    back to the system (2 ms for 12 MB) is the caller's in either case.
    """
    inner: list[float] = []
    places = {"load_media": "decode_image", "chat_format": "render_template", "encoder": "call_processor"}
    timed_functions = [(import_module(f"vlm_stream.encode.{room}"), name) for room, name in places.items()]
    originals = [getattr(room, name) for room, name in timed_functions]
    rows = [("sample", "directly, ms", "encode, ms", "encode / directly", "our own part, ms", "own / directly")]
    for family in ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava_onevision"):
        for label, with_image, times in (("1024x768 JPEG", True, 1), ("text only", False, 5)):
            encoder = Encoder(build_processor(family))
            conversation, members = chat(3, 20, with_image), {"0.jpg": photo(768, 1024)}
            direct, whole, ours = [], [], []
            gc.collect()
            gc.disable()
            for _ in range(repetitions * times):
                begin = time.process_time()
                sample = call_directly(encoder.processor, conversation, members["0.jpg"] if with_image else None)
                direct.append(time.process_time() - begin)
                inner.clear()
                for (room, name), original in zip(timed_functions, originals, strict=True):
                    setattr(room, name, _timed(original, inner))
                begin = time.process_time()
                sample = encoder.encode(conversation, members)
                taken = time.process_time() - begin - _clock_cost(len(inner))
                for (room, name), original in zip(timed_functions, originals, strict=True):
                    setattr(room, name, original)
                del sample
                whole.append(taken)
                ours.append(taken - sum(inner))
            gc.enable()
            a, b, c = median(direct), median(whole), median(ours)
            figures = (f"{a * 1e3:.2f}", f"{b * 1e3:.2f}", f"{b / a:.3f}", f"{c * 1e3:.3f}", f"{c / a:.1%}")
            rows.append((f"{family}, {label}", *figures))
    table("Overhead of our layer: labels, checks, typed markers", rows)


def kept(repetitions: int) -> None:
    """Print a sample from its JSON and media bytes to tensors, with and without the tokens that conversion kept."""
    rows = [("sample", "tokenised again, ms", "kept, ms", "times faster", "bytes kept / token")]
    for pixels in ("full", "compact"):
        for label, num_turns, words, with_image in (
            ("text only, 450 words", 3, 30, False),
            ("1024x768 JPEG, 100 words", 1, 20, True),
        ):
            processor = build_processor("qwen2_5_vl")
            encoder = Encoder(processor, EncodeConfig(pixels=pixels))
            conversation = chat(num_turns, words, with_image)
            members = {"json": b"", "0.jpg": photo(768, 1024)}
            sizes = MediaSizes(images=(ImageSize(height=768, width=1024),) if with_image else ())
            tokens = ExactCounter("", processor).count_and_keep(conversation, sizes).tokens
            members["json"] = keep_tokens(json.dumps({"conversation": conversation}).encode(), tokens)

            def encode(uses: bool, members: Any = members, encoder: Encoder = encoder) -> Any:
                turns, found = read_sample(FieldMap(), tuple(members), {"json": members["json"]})
                return encoder.encode(turns, members, unpack_text(found, found["key"]) if uses else None)

            for _ in range(4):  # until it is trusted
                sample = encode(True)
            found = interleaved({"again": lambda f=encode: f(False), "kept": lambda f=encode: f(True)}, repetitions)
            num_tokens = len(sample["input_ids"])
            rows.append(
                (
                    f"{label}, {num_tokens} tokens, {pixels} pixels",
                    f"{found['again'] * 1e3:.2f}",
                    f"{found['kept'] * 1e3:.2f}",
                    f"{found['again'] / found['kept']:.2f}",
                    f"{len(json.dumps(tokens)) / num_tokens:.2f}",
                )
            )
    table("Text that conversion has tokenised", rows)


def call_directly(processor: Any, conversation: list[dict[str, Any]], jpeg: bytes | None) -> dict[str, Any]:
    """Return the processor's batch as a script without this package would get it."""
    arguments: dict[str, Any] = {} if jpeg is None else {"images": [[Image.open(io.BytesIO(jpeg)).convert("RGB")]]}
    text = processor.apply_chat_template(conversation, tokenize=False)
    return dict(processor(text=[text], return_tensors="pt", **arguments))


def loop_scan(ids: torch.Tensor, marker: list[int], stop: int) -> torch.Tensor:
    """Label one token at a time over a tensor, as a direct implementation does."""
    labels, position = torch.full_like(ids, IGNORE), 0
    while position < len(ids):
        if position + len(marker) <= len(ids) and ids[position : position + len(marker)].tolist() == marker:
            position += len(marker)
            while position < len(ids):
                labels[position] = ids[position]
                position += 1
                if ids[position - 1].item() == stop:
                    break
        else:
            position += 1
    return labels


def labels(repetitions: int) -> None:
    """Compare label building with the loop at 32k tokens."""
    processor = build_processor("qwen2_5_vl")
    encoder = Encoder(processor, EncodeConfig())
    conversation = chat(40, 135, False)
    rendered: Rendered = encoder.render(conversation)[0]
    ids = processor.tokenizer(rendered.text, return_tensors="pt")["input_ids"][0][:32768]
    text = rendered.text
    marker = find_marker(processor)
    if marker is None:
        raise SystemExit("the processor has no answer marker")
    array, train = ids.numpy(), [True] * 40
    while len(encoder.processor.tokenizer(text)["input_ids"]) > 32768:
        conversation = conversation[:-2]
        train = train[:-1]
        rendered = encoder.render(conversation)[0]
        text = rendered.text
    array = processor.tokenizer(text, return_tensors="np")["input_ids"][0]
    ids = torch.from_numpy(array)
    assert torch.equal(
        loop_scan(ids, list(marker.ids), marker.stop_id),
        torch.from_numpy(label_answers(processor, encoder.chat, rendered, array, train)),
    )
    loop = interleaved({"loop": lambda: loop_scan(ids, list(marker.ids), marker.stop_id)}, 3)["loop"]
    times = interleaved(
        {
            "labels from the rendered text": lambda: label_answers(processor, encoder.chat, rendered, array, train),
            "vectorised marker scan": lambda: scan_markers(array, marker, processor.tokenizer, conversation),
        },
        repetitions,
    )
    rows = [(f"{len(ids)} tokens, {len(train)} answers", "ms", "times faster than the loop")]
    rows.append(("per-token loop", f"{loop * 1e3:.1f}", "1"))
    rows += [(name, f"{seconds * 1e3:.2f}", f"{loop / seconds:.0f}") for name, seconds in times.items()]
    table("Labels", rows)


def _timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        out = function(*args, **kwargs)
        into.append(time.process_time() - begin)
        return out

    return timed


def _clock_cost(calls: int) -> float:
    """Return the seconds that timing so many calls of nothing adds outside of them."""
    inner: list[float] = []
    nothing = _timed(lambda: None, inner)
    begin = time.process_time()
    for _ in range(calls):
        nothing()
    return time.process_time() - begin - sum(inner)


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=60)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    overhead(repetitions)
    kept(repetitions)
    labels(repetitions)


if __name__ == "__main__":
    main()
