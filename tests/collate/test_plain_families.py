"""Families whose positions count on by one: packed rows of Gemma-3 (images seen both ways, sliding window) and "
"InternVL."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from vlm_stream.collate import PositionRule, build_hf_pack, join_hf_packs
from vlm_stream.encode import Encoder
from vlm_stream.errors import ConfigError
from vlm_stream.testing import build_processor, make_toy_image

TOKENS = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")
EXACT = 1e-5
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 32,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 224,
    "patch_size": 14,
}


@cache
def gemma3() -> tuple[Any, list[dict[str, Any]]]:
    """Return a tiny model and encoded samples: one image, text alone, two images."""
    import transformers

    processor = build_processor("gemma3")
    encoder = Encoder(processor)
    looks = [[make_toy_image(60, 60, 1)], [], [make_toy_image(50, 60, 2), make_toy_image(60, 50, 3)]]
    samples = []
    for number, images in enumerate(looks):
        content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": "what? " * (number + 1)})
        answer = [{"type": "text", "text": "it is a ship indeed"}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        samples.append(encoder.encode(turns, {}))
    image_token = samples[0]["input_ids"][samples[0]["token_type_ids"] == 1][0]
    tokenizer = processor.tokenizer
    config = transformers.Gemma3Config(
        text_config={**TEXT, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id},
        vision_config=VISION,
        mm_tokens_per_image=processor.image_seq_length,
        image_token_id=int(image_token),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.Gemma3ForConditionalGeneration(config), samples


def train(model: Any, batches: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss = model(**batch, use_cache=False, num_items_in_batch=1).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(sample: dict[str, Any]) -> dict[str, Any]:
    return {key: value[None] if key in TOKENS else value for key, value in sample.items()}


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_packs_train_as_their_samples_one_by_one(impl: str) -> None:
    model, samples = gemma3()
    model.set_attn_implementation(impl)
    assert PositionRule.from_config(model.config) is None
    packs = [build_hf_pack(samples[:2], pad_to=330), build_hf_pack(samples[2:])]
    loss, grads = train(model, [alone(sample) for sample in samples])
    packed_loss, packed = train(model, [join_hf_packs(packs)])
    assert packed_loss == pytest.approx(loss, rel=EXACT)
    # The bias of keys has no gradient but rounding (softmax does not see it), hence the floor.
    floor = 1e-4 * max(g.norm() for g in grads.values())
    assert max(float((g - packed[k]).norm() / max(g.norm(), floor)) for k, g in grads.items()) < EXACT


def test_a_causal_mask_is_refused_where_images_are_seen_both_ways() -> None:
    with pytest.raises(ConfigError, match="image tokens see each other; it would train another model"):
        build_hf_pack(gemma3()[1], attention="mask4d")
