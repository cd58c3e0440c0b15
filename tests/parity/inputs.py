"""Inputs that hypothesis draws: conversations with small images, encoded samples, packs."""

from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from vlm_stream.testing import build_processor, make_toy_image

WORDS = ("ship", "two cats", "Straße", "x = 1", "\u4f60\u597d", "1,024", "it's", "a  b", "line\nbreak", "(why?)", "ok.")
SMALL = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}

ANSWERS = ("Yes,", "a boat", "drei", "y = 2;", "\u4e16\u754c", "77", "isn't", "(no)", "so  what", "two\nlines", "end.")
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)
answers = st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=5).map(" ".join)
"""Words that no question has: NeMo Automodel looks some answers up by their text."""
sides = st.sampled_from((28, 56, 61, 84, 140))
images = st.builds(make_toy_image, sides, sides, st.integers(0, 3))


@cache
def processor_of(family):
    small = {"image": {"size": SMALL}}
    made = {
        "qwen2_5_vl": small | {"video": {"size": SMALL}},
        "qwen3_vl": small,
        "qwen3_omni_moe": small,
        "internvl": {"image": {"max_patches": 2}},
    }.get(family, {})
    processor = build_processor(family, **made)
    processor.tokenizer.chat_template = processor.chat_template  # published tokenizers have it too
    return processor


def turn(role, *items):
    return {"role": role, "content": list(items)}


def text_item(text):
    return {"type": "text", "text": text}


def image_item(image):
    return {"type": "image", "image": image}


@st.composite
def conversations(draw, max_images=2, max_turns=2, system=True, answers=answers):
    """Questions with images anywhere among their texts, and answers."""
    out = [turn("system", text_item(draw(texts)))] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, max_turns))):
        pictures = [image_item(one) for one in draw(st.lists(images, max_size=max_images))]
        items = draw(st.permutations([*pictures, text_item(draw(texts))]))
        out += [turn("user", *items), turn("assistant", text_item(draw(answers)))]
    return out


def batches(max_size=3, **options):
    return st.lists(conversations(**options).map(lambda c: {"conversation": c}), min_size=1, max_size=max_size)


def image_counts(examples):
    return [sum(item["type"] == "image" for m in e["conversation"] for item in m["content"]) for e in examples]


def tensor(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


@st.composite
def encoded(draw, media=True, min_length=2):
    """A sample as an encoder gives it: its grids fit its pixels."""
    length = draw(st.integers(min_length, 12))
    ids = tensor(draw(st.lists(st.integers(3000, 3090), min_size=length, max_size=length)))
    learned = tensor(draw(st.lists(st.booleans(), min_size=length, max_size=length)), torch.bool)
    sample = {
        "input_ids": ids,
        "attention_mask": torch.ones(length, dtype=torch.int64),
        "labels": torch.where(learned, ids, -100),
    }
    if draw(st.booleans()):
        sample["mm_token_type_ids"] = torch.zeros(length, dtype=torch.int64)
    for pixels, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        rows = draw(st.lists(st.tuples(st.just(1), *[st.sampled_from((2, 4))] * 2), max_size=2)) if media else []
        if rows:
            sample[grid] = tensor(rows)
            patches = int(sample[grid].prod(-1).sum())
            sample[pixels] = torch.arange(patches * 3, dtype=torch.float32).reshape(patches, 3) / 7
    return sample


def waves(seconds):
    return np.sin(np.arange(int(16_000 * seconds)) / 7).astype(np.float32)
