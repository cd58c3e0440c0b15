"""Every family's own function on every kind of batch, with the real processor; the table is printed with `-s`.

Each batch is compared with the one that padding and joining single encoded samples gives.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from vlm_stream.collate import (
    gemma4_prefix_collate_fn,
    get_collate,
    llava_onevision_collate_fn,
    pad_collate_fn,
    phi4_mm_collate_fn,
)
from vlm_stream.encode import IGNORE, EncodeConfig, Encoder
from vlm_stream.testing import FAMILIES, build_processor, make_jpeg, make_mp4, make_toy_image, make_wav

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # inside transformers

SMALL = {
    "smolvlm": {"image": {"size": {"longest_edge": 728}}},
    "gemma3": {"image": {"size": {"height": 56, "width": 56}}},
    "internvl": {
        "image": {"size": {"height": 112, "width": 112}, "max_patches": 3},
        "video": {"size": {"height": 112, "width": 112}},
    },
}
IMAGE = {"type": "image", "image": make_toy_image(60, 90, 1)}
OTHER = {"type": "image", "image": make_jpeg(96, 64, 2)}
VIDEO = {"type": "video", "video": make_mp4(num_frames=9, height=64, width=64, fps=4.0)}
AUDIO = {"type": "audio", "audio": make_wav(0.5)}
LONGER = {"type": "audio", "audio": make_wav(0.9, seed=4)}
KINDS = {
    "image": [[IMAGE], [OTHER]],
    "images": [[IMAGE, OTHER], [OTHER]],
    "video": [[VIDEO]],
    "audio": [[AUDIO], [LONGER]],
    "text": [[], []],
    "mixed": [[], [IMAGE], [OTHER, IMAGE]],
    "everything": [[], [IMAGE], [VIDEO], [AUDIO]],
}


def example(media: list[dict], number: int) -> dict:
    items = [part for item in media for part in (item, {"type": "text", "text": f"part {number}"})]
    return {
        "conversation": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [*items, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "\nFirst. " * (number + 1)}]},
            {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": f"Yes, {number}."}]},
        ]
    }


def shapes(batch: dict) -> str:
    return ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_batch(family):
    processor = build_processor(family, **SMALL.get(family, {}))
    encoder = Encoder(processor, EncodeConfig())
    own = {"phi4_multimodal": phi4_mm_collate_fn}.get(family) or get_collate(processor)
    for kind, rows in KINDS.items():
        rows = [row for row in rows if all(item["type"] in encoder.reads.media for item in row)]
        if kind in ("video", "audio") and not rows:
            continue
        examples = [example(row, number) for number, row in enumerate(rows)]
        untouched = copy.deepcopy([[list(m["content"]) for m in e["conversation"]] for e in examples])
        batch = own(examples, processor)
        print(f"{family:16} {type(processor).__name__:38} {kind:10} {shapes(batch)}")  # noqa: T201
        samples = [encoder.encode(e["conversation"], {}) for e in examples]
        padded = pad_collate_fn(samples, processor)
        _assert_same(batch, padded, family, kind)
        _assert_labels(batch, samples)
        assert [[list(m["content"]) for m in e["conversation"]] for e in examples] == untouched
        _assert_counts(batch, rows)


def _assert_same(batch: dict, padded: dict, family: str, kind: str) -> None:
    """Compare a family's batch with samples padded one by one; padding may stand on the other side."""
    for key, value in padded.items():
        if key in ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids"):
            continue
        ours = batch[key]
        if family == "smolvlm" and ours.shape[0] > value.shape[0]:
            ours = ours[ours.flatten(1).any(dim=1)]  # a batch holds empty rows for texts without media
        if key in ("input_features", "audio_input_features") and ours.shape == value.shape:
            continue  # sound that is padded before or after its transform differs where the mask hides it
        assert torch.equal(ours.to(value.dtype), value), (family, kind, key)


def _assert_labels(batch: dict, samples: list[dict]) -> None:
    """Labels are shifted: column t holds what follows input t."""
    for row, sample in enumerate(samples):
        learned = batch["labels"][row] != IGNORE
        assert batch["labels"][row][learned].tolist() == sample["labels"][sample["labels"] != IGNORE].tolist()
        inside = learned[:-1].nonzero().flatten()
        assert torch.equal(batch["labels"][row][inside], batch["input_ids"][row][inside + 1])
        assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape


def _assert_counts(batch: dict, rows: list[list[dict]]) -> None:
    for key, medium in (("n_images_per_sample", "image"), ("n_videos_per_sample", "video")):
        numbers = [sum(item["type"] == medium for item in row) for row in rows]
        if key in batch:
            assert batch[key].tolist() == numbers
            assert batch[key].dtype == torch.int64


def test_pixels_of_the_default_function_are_bfloat16_and_those_of_qwen_are_not():
    examples = [example([IMAGE], 0)]
    assert get_collate(p := build_processor("qwen2_vl"))(examples, p)["pixel_values"].dtype == torch.bfloat16
    assert get_collate(p := build_processor("qwen2_5_vl"))(examples, p)["pixel_values"].dtype == torch.float32
    p = build_processor("llava_onevision")
    assert llava_onevision_collate_fn(examples, p)["pixel_values"].dtype == torch.float32


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_gemma4_with_prefix_takes_every_kind(family):
    processor = build_processor(family)
    for kind, rows in KINDS.items():
        batch = gemma4_prefix_collate_fn([example(row, i) for i, row in enumerate(rows)], processor)
        assert np.isin(batch["labels"].numpy(), batch["input_ids"].numpy()).any(), kind
