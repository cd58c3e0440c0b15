"""`build_tiny_model(family, processor)`: real model classes from small configs, seeded, float32 on the CPU."""

import math
from collections.abc import Callable
from typing import Any, Final

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.testing.processors import build_processor, transformers_class


def _text_config(processor: Any, **more: Any) -> dict[str, Any]:
    tokenizer = processor.tokenizer
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        **more,
    }


def _qwen_ids(processor: Any) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: processor.tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _build_qwen(processor: Any, prefix: str, rope: dict[str, Any], vision: dict[str, Any], **text: Any) -> Any:
    """Build a model of Qwen's; `rope`, `vision` and `text` are what its generation adds to the config."""
    reads = processor.image_processor
    sizes = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "patch_size": reads.patch_size,
        "spatial_merge_size": reads.merge_size,
        "temporal_patch_size": reads.temporal_patch_size,
    }
    config = transformers_class(f"{prefix}Config")(
        text_config=_text_config(processor, **text, rope_parameters={"rope_type": "default", **rope}),
        vision_config=sizes | vision,
        **_qwen_ids(processor),
    )
    return transformers_class(f"{prefix}ForConditionalGeneration")(config)


def _build_qwen2_vl(processor: Any) -> Any:
    rope = {"mrope_section": [2, 3, 3], "rope_theta": 1e6}
    return _build_qwen(processor, "Qwen2VL", rope, {"embed_dim": 64, "mlp_ratio": 2})


def _build_qwen2_5_vl(processor: Any) -> Any:
    rope = {"mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision = {
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    return _build_qwen(processor, "Qwen2_5_VL", rope, vision)


def _build_qwen3_vl(processor: Any) -> Any:
    rope = {"mrope_section": [4, 2, 2], "rope_theta": 5e6, "mrope_interleaved": True}
    vision = {
        "depth": 3,
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    return _build_qwen(processor, "Qwen3VL", rope, vision, head_dim=16)


def _build_gemma3(processor: Any) -> Any:
    side = int(processor.image_processor.size["height"])
    tokens_along = math.isqrt(processor.image_seq_length)
    patch = side // tokens_along  # the projector pools the grid of patches down to the tokens
    vision = _siglip_config(side, patch)
    text = _text_config(processor, head_dim=16, sliding_window=4096, bos_token_id=processor.tokenizer.bos_token_id)
    tokenizer = processor.tokenizer
    config = transformers_class("Gemma3Config")(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=processor.image_seq_length,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    model = transformers_class("Gemma3ForConditionalGeneration")(config)
    # Born as zeros, for a checkpoint to fill: images would neither be seen nor learnt from.
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=0.02)
    return model


def _build_llava_onevision(processor: Any) -> Any:
    side = int(processor.image_processor.size["height"])
    vision = {**_siglip_config(side, side // math.isqrt(processor.num_image_tokens)), "vision_use_head": False}
    config = transformers_class("LlavaOnevisionConfig")(
        text_config={"model_type": "qwen2", **_text_config(processor)},
        vision_config={"model_type": "siglip_vision_model", **vision},
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_feature_select_strategy=processor.vision_feature_select_strategy,
        vision_feature_layer=-1,
        vision_aspect_ratio=processor.vision_aspect_ratio,
        image_grid_pinpoints=processor.image_processor.image_grid_pinpoints,
    )
    return transformers_class("LlavaOnevisionForConditionalGeneration")(config)


def _siglip_config(side: int, patch: int) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": side,
        "patch_size": patch,
    }


_BUILDERS: Final[dict[str, Callable[[Any], Any]]] = {
    "gemma3": _build_gemma3,
    "llava_onevision": _build_llava_onevision,
    "qwen2_5_vl": _build_qwen2_5_vl,
    "qwen2_vl": _build_qwen2_vl,
    "qwen3_vl": _build_qwen3_vl,
}

MODEL_FAMILIES: Final = tuple(sorted(_BUILDERS))
"""Families that `build_tiny_model` knows."""


def build_tiny_model(family: str, processor: Any = None, *, seed: int = 0) -> Any:
    """Build a tiny model of a family that fits the processor's vocabulary and patches.

    Args:
        family: A name of `MODEL_FAMILIES`.
        processor: A processor of the family; the one of `build_processor(family)` if none is given.
        seed: Chooses the weights; torch's own generator is left as it was.

    Returns:
        A float32 model on the CPU, in training mode.

    Raises:
        ConfigError: For a family that is not in `MODEL_FAMILIES`.

    Example:
        >>> model = build_tiny_model("qwen2_5_vl")
        >>> sum(p.numel() for p in model.parameters()) < 2_000_000
        True
    """
    if family not in _BUILDERS:
        raise ConfigError(
            f"There is no tiny model of the family {family!r}, so none can be built: "
            f"{nearest_name(family, MODEL_FAMILIES)}"
        )
    import torch

    processor = build_processor(family) if processor is None else processor
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _BUILDERS[family](processor).float().train()
