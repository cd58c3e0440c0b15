"""Tiny real models take what the stream delivers: a finite loss, and the same one packed as in rows of their own."""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import tests.stream.test_families as t
from vlm_stream.collate import PositionRule, compute_mrope_position_ids
from vlm_stream.convert import make_shards
from vlm_stream.encode import IGNORE, Encoder
from vlm_stream.loader import StreamLoader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = t.pytestmark

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
EYES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
}
SOUND: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "output_dim": 32,
}
MEDIA = ("image", "video", "audio")
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}


def text_of(processor: Any, **more: Any) -> dict[str, Any]:
    tokenizer = processor.tokenizer
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return {**TEXT, "vocab_size": len(tokenizer), **ids, **more}


def internvl(processor: Any) -> dict[str, Any]:
    side = processor.image_processor.size["height"]
    return {
        "text_config": {"model_type": "qwen2", **text_of(processor)},
        "vision_config": {**VISION, "image_size": [side, side], "patch_size": [14, 14]},
        "image_token_id": processor.image_token_id,
        "downsample_ratio": 0.5,
    }


def idefics(processor: Any) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama", **text_of(processor)},
        "vision_config": {**VISION, "image_size": 364, "patch_size": 14},
        "image_token_id": processor.image_token_id,
        "scale_factor": 2,
    }


def paligemma(processor: Any) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "gemma", **text_of(processor)},
        "vision_config": {**VISION, "image_size": 56, "patch_size": 14, "projection_dim": 32},
        "image_token_index": processor.image_token_id,
        "projection_dim": 32,
    }


def llava_next(processor: Any) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama", **text_of(processor)},
        "vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": 56, "patch_size": 14},
        "image_token_index": processor.image_token_id,
        "image_grid_pinpoints": [[56, 112]],
    }


def mistral3(processor: Any) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "mistral", **text_of(processor)},
        "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 16, "patch_size": processor.patch_size},
        "image_token_index": processor.image_token_id,
        "spatial_merge_size": processor.spatial_merge_size,
    }


def glm46v(processor: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    return {
        "text_config": {"model_type": "glm4v_text", **text_of(processor, rope_parameters=rope)},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
        **{f"{medium}_token_id": getattr(processor, f"{medium}_token_id") for medium in ("image", "video")},
        "video_start_token_id": processor.video_start_id,
        "video_end_token_id": processor.video_end_id,
    }


def llama4(processor: Any) -> dict[str, Any]:
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64}
    return {
        "text_config": text_of(processor, **experts),
        "vision_config": {**VISION, **sizes, "intermediate_size": 128, "image_size": 336, "patch_size": 14},
        "image_token_index": processor.tokenizer.convert_tokens_to_ids(processor.img_patch_token),
    }


def kimi_k25(processor: Any) -> dict[str, Any]:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    more = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    return {
        "text_config": {"model_type": "deepseek_v3", **text_of(processor, **latent, **experts, **more)},
        "vision_config": dict(VISION),
        "projection_hidden_size": 32,
        **{f"{medium}_token_id": getattr(processor, f"{medium}_token_id") for medium in ("image", "video")},
    }


def omni_ids(processor: Any, suffix: str) -> dict[str, int]:
    ids = processor.tokenizer.convert_tokens_to_ids
    media = {f"{medium}_token_{suffix}": ids(getattr(processor, f"{medium}_token")) for medium in MEDIA}
    begins = {"audio_start_token_id": processor.audio_bos_token, "vision_start_token_id": processor.vision_bos_token}
    return media | {name: ids(token) for name, token in begins.items()}


def qwen2_5_omni(processor: Any) -> dict[str, Any]:
    return {
        "text_config": text_of(processor, rope_parameters=MROPE),
        "vision_config": {**EYES, "fullatt_block_indexes": [1]},
        "audio_config": SOUND,
        **omni_ids(processor, "index"),
    }


def qwen3_omni(processor: Any) -> dict[str, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return {
        "text_config": text_of(processor, rope_parameters=MROPE | {"mrope_interleaved": True}, **experts),
        "vision_config": {**EYES, "deepstack_visual_indexes": [0], "num_position_embeddings": 256},
        "audio_config": {**SOUND, "downsample_hidden_size": 16},
        "position_id_per_seconds": 13,  # as its checkpoints have it, and its processor
        **omni_ids(processor, "id"),
    }


def gemma4(processor: Any) -> dict[str, Any]:
    text = {
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": len(processor.tokenizer),
    }
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    return {
        "text_config": text_of(processor, **text, **kinds),
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 16},
        "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
        **{f"{medium}_token_id": getattr(processor, f"{medium}_token_id") for medium in MEDIA},
    }


BUILDERS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "gemma4": ("Gemma4", gemma4),
    "glm46v": ("Glm46V", glm46v),
    "idefics3": ("Idefics3", idefics),
    "internvl": ("InternVL", internvl),
    "kimi_k25": ("Kimi_K25", kimi_k25),
    "llama4": ("Llama4", llama4),
    "llava_next": ("LlavaNext", llava_next),
    "paligemma": ("PaliGemma", paligemma),
    "pixtral": ("Mistral3", mistral3),
    "qwen2_5_omni": ("Qwen2_5OmniThinker", qwen2_5_omni),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinker", qwen3_omni),
    "smolvlm": ("SmolVLM", idefics),
}
FITTED = {"internvl": {"image_seq_length": 4}, "paligemma": {"image_seq_length": 16}, "smolvlm": {"image_seq_len": 169}}
"""What processors must say of images as small as those here, for models to agree."""


NO_VIDEOS = ("gemma4", "glm46v", "kimi_k25")
"""Models that transformers 5.22 cannot give videos: Gemma 4 loses their numbers of frames on the way, Kimi-K2.5 cuts
features that are pooled over time by their number before, GLM-4.6V takes them for images where both are in a batch."""


def samples_of(family: str) -> t.Samples:
    media = Encoder(processor_of(family)).reads.media - ({"video"} if family in NO_VIDEOS else set())
    return t.Samples(media, one_answer=family in t.ONE_ANSWER)


@cache
def processor_of(family: str) -> Any:
    processor = copy.deepcopy(t.processor_of(family))
    for name, value in FITTED.get(family, {}).items():
        setattr(processor, name, value)
        if hasattr(processor.image_processor, name):
            setattr(processor.image_processor, name, value)
    return processor


@cache
def build(family: str) -> Any:
    prefix, settings = BUILDERS[family]
    config = getattr(transformers, f"{prefix}Config")(**settings(processor_of(family)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()


def deliveries(family: str, shards: Path, **options: Any) -> list[Any]:
    loader = StreamLoader(shards, processor=processor_of(family), bad_budget=0, rank=0, world_size=1, **options)
    return [delivery for _, delivery in loader.stream.deliveries()]


def total_loss(family: str, shards: Path, **options: Any) -> float:
    """Return the sum over all that is learned of all samples."""
    model, total, num_learned = build(family), 0.0, 0
    for delivery in deliveries(family, shards, **options):
        batch = dict(delivery.batch)
        labels = batch.pop("labels")
        with torch.no_grad():
            batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}  # Llama 4's are bfloat16
            logits = model(**batch, use_cache=False).logits.float()
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        assert torch.isfinite(losses), family
        total += losses.item()
        num_learned += int((labels != IGNORE).sum())
    assert num_learned
    return total


@pytest.mark.parametrize("family", BUILDERS)
def test_a_packed_row_has_the_loss_of_its_samples(family: str, tmp_path: Path) -> None:
    make_shards(samples_of(family), tmp_path / "shards", processor=processor_of(family), samples_per_shard=3)
    alone = total_loss(family, tmp_path / "shards", **t.GROUPED)
    if not t.family_of(processor_of(family)).no_packing:
        assert total_loss(family, tmp_path / "shards", **t.PACKED) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_positions_of_omni_are_those_of_the_model(family: str) -> None:
    processor, model, source = processor_of(family), build(family), samples_of(family)
    rule = PositionRule.from_processor(processor)
    assert rule is not None
    encoder = Encoder(processor)
    for number in range(len(source)):
        sample = encoder.encode(source.read(number).conversation, {})
        expected = compute_mrope_position_ids(sample, model.get_rope_index)
        assert torch.equal(rule(sample), expected), number
