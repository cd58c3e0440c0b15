"""Encoded samples of every kind, made by real processors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from vlm_stream.testing import build_processor, build_tiny_model, make_toy_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}


@cache
def processor_of(family: str) -> Any:
    # Qwen3-VL limits the whole clip, the others each frame.
    clip = SMALL if family != "qwen3_vl" else {"shortest_edge": 4096, "longest_edge": 8 * 64 * 64}
    return build_processor(family, image={"size": SMALL}, video={"size": clip})


@cache
def model_of(family: str, attention: str) -> Any:
    model = build_tiny_model(family, processor_of(family))
    model.set_attn_implementation(attention)
    return model


def encode(processor: Any, content: list[dict[str, Any]], fps: float = 2.0) -> dict[str, Any]:
    """Encode one conversation; everything after the user's turn is trained."""
    videos = [item["video"] for item in content if item["type"] == "video"]
    meta = [
        {"fps": fps, "duration": len(v) / fps, "total_num_frames": len(v), "frames_indices": [*range(len(v))]}
        for v in videos
    ]
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "it is what it is " * 3}]},
    ]
    more = {"do_sample_frames": False, "video_metadata": meta} if videos else {}
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    out = processor.apply_chat_template(turns, **options, processor_kwargs=more)
    sample = {key: value for key, value in out.items() if isinstance(value, (torch.Tensor, list))}
    sample.pop("video_metadata", None)
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        sample[key] = sample[key][0]
    labels = sample["input_ids"].clone()
    labels[: len(labels) // 2] = -100
    labels[sample["mm_token_type_ids"] > 0] = -100
    return sample | {"labels": labels}


def frames(n: int, side: int, seed: int) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(make_toy_image(side, side, seed + i)) for i in range(n)])


@cache
def kinds_of(family: str) -> dict[str, dict[str, Any]]:
    """Return encoded samples by kind."""
    processor = processor_of(family)
    image = lambda h, w, seed: {"type": "image", "image": make_toy_image(h, w, seed)}  # noqa: E731
    video = lambda n, seed: {"type": "video", "video": frames(n, 64, seed)}  # noqa: E731
    text = lambda words: {"type": "text", "text": words}  # noqa: E731
    contents = {
        "image": [image(112, 84, 1), text("what is this?")],
        "images": [text("compare"), image(56, 112, 2), text("with"), image(84, 84, 3), text("and"), image(112, 56, 4)],
        "video": [video(8, 20), text("what happens?")],
        "mixed": [video(4, 30), text("and"), image(84, 56, 5), text("or"), video(6, 40)],
        "text": [text("no picture at all, tell me a story about ships")],
        "faked": [image(56, 56, 6), text("no picture at all, tell me a story about ships")],
        "short": [text("hi")],
    }
    samples = {kind: encode(processor, content) for kind, content in contents.items()}
    faked = samples["faked"]
    names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    hidden = processor.tokenizer.convert_tokens_to_ids(names)
    faked["attention_mask"] = (~torch.isin(faked["input_ids"], torch.tensor(hidden))).long()
    # The same tokens are trained as in the sample that it stands for.
    faked["labels"] = torch.where(faked["attention_mask"] == 1, faked["input_ids"], -100)
    visible_before = len(faked["input_ids"]) - len(samples["text"]["input_ids"])
    faked["labels"][: visible_before + len(samples["text"]["input_ids"]) // 2] = -100
    return samples


@pytest.fixture(scope="session")
def kinds() -> Callable[[str], dict[str, dict[str, Any]]]:
    return kinds_of


@pytest.fixture(scope="session")
def model() -> Callable[[str, str], Any]:
    return model_of


@pytest.fixture(scope="session")
def processor() -> Callable[[str], Any]:
    return processor_of


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models are fastest on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
