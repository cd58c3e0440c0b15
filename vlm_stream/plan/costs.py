"""What a sample costs the model: one number for the language model, one for the vision tower.

Enters: lengths and patch counts, and four coefficients. Leaves: whole numbers, so that sums are the same in any order
on any machine and all ranks agree on a plan without talking.

The coefficients may be derived from a model's config (a dict or an object with attributes, the nested form of a
`config.json`), in units of one text token. Counted are the multiplications of matrices and of attention scores; a
backward pass costs two forward passes, one without weight gradients, none where nothing below needs a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import ConfigError
from vlm_stream.plan.config import CostConfig

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["costs_of_model", "llm_cost", "vit_cost"]


def llm_cost(tokens: npt.NDArray[np.int64], costs: CostConfig) -> npt.NDArray[np.int64]:
    """Return [n] the language model's cost of documents of that length."""
    length = tokens.astype(np.float64)
    return np.rint((length * costs.llm_linear + length * length * costs.llm_square) * costs.scale).astype(np.int64)


def vit_cost(
    patches: npt.NDArray[np.int64], squares: npt.NDArray[np.float64], costs: CostConfig
) -> npt.NDArray[np.int64]:
    """Return [n] the vision tower's cost of samples with that many patches."""
    linear = patches.astype(np.float64) * costs.vit_linear
    return np.rint((linear + squares * costs.vit_square) * costs.scale).astype(np.int64)


def costs_of_model(config: Any, *, frozen_vit: bool = False, frozen_llm: bool = False) -> CostConfig:
    """Derive the four coefficients from hidden sizes, layers and vocabulary.

    Args:
        config: Model config with `text_config` (or its fields at the top) and maybe `vision_config`.
        frozen_vit: The vision tower runs forward only.
        frozen_llm: The language model passes gradients on and learns nothing.
    """
    text = _get(config, "text_config", "llm_config", "language_config", default=config)
    vision = _get(config, "vision_config", "vit_config", default=None)
    llm_factor = 2.0 if frozen_llm else 3.0
    linear, square = _llm_flops(text)
    vit_linear, vit_square = _vit_flops(vision) if vision is not None else (0.0, 0.0)
    vit_factor = 1.0 if frozen_vit else 3.0
    one = llm_factor * linear
    return CostConfig(
        llm_linear=1.0,
        llm_square=llm_factor * square / one,
        vit_linear=vit_factor * vit_linear / one,
        vit_square=vit_factor * vit_square / one,
    )


def _llm_flops(text: Any) -> tuple[float, float]:
    """Return forward multiply-adds per token, and per squared token."""
    hidden = _need(text, "hidden_size", "n_embd", "d_model")
    layers = _need(text, "num_hidden_layers", "n_layer")
    heads = _need(text, "num_attention_heads", "n_head")
    head_dim = _get(text, "head_dim", default=None) or hidden // heads
    kv_heads = _get(text, "num_key_value_heads", default=None) or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = _get(text, "num_experts_per_tok", "num_experts_per_token", default=None)
    width = _get(text, "moe_intermediate_size", default=None) if experts else None
    if width:
        shared = _get(text, "shared_expert_intermediate_size", default=None)
        shared = shared or width * (_get(text, "n_shared_experts", default=None) or 0)
        mlp = 3 * hidden * (width * experts + shared)
    else:
        mlp = 3 * hidden * _need(text, "intermediate_size", "n_inner")
    head = hidden * _need(text, "vocab_size")
    # Scores and values, each heads * head_dim * length / 2 per token under a causal mask.
    return float(layers * (attention + mlp) + head), float(layers * heads * head_dim)


def _vit_flops(vision: Any) -> tuple[float, float]:
    """Return forward multiply-adds per patch, and per squared patch of an image."""
    # Where both are given, `hidden_size` is the width of the language model.
    hidden = _need(vision, "embed_dim", "hidden_size")
    layers = _need(vision, "depth", "num_hidden_layers")
    width = _get(vision, "intermediate_size", default=None) or hidden * _get(vision, "mlp_ratio", default=4)
    gated = str(_get(vision, "hidden_act", default="")) in ("silu", "swish")
    full = _get(vision, "fullatt_block_indexes", default=None)
    num_full = layers if full is None else len(full)
    linear = layers * (4 * hidden * hidden + (3 if gated else 2) * hidden * width)
    return float(linear), float(num_full * 2 * hidden)


def _get(config: Any, *names: str, default: Any) -> Any:
    for name in names:
        value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
        if value is not None:
            return value
    return default


def _need(config: Any, *names: str) -> Any:
    value = _get(config, *names, default=None)
    if value is None:
        raise ConfigError(
            f"The model config has no '{names[0]}', so costs cannot be derived from it. Give the config of the "
            f"model (text_config and vision_config), or set the four coefficients of CostConfig by hand."
        )
    return value
