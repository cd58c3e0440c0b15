"""Costs: whole numbers, and coefficients from a model's config."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vlm_stream.errors import ConfigError
from vlm_stream.plan import CostConfig, costs_of_model
from vlm_stream.plan.balance import llm_cost, vit_cost

TEXT = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
VISION = {
    "hidden_size": 1280,
    "depth": 32,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def test_one_token_is_the_unit():
    costs = CostConfig(llm_linear=5.0, llm_square=0.0)
    assert llm_cost(np.asarray([1, 10]), costs).tolist() == [1024, 10240]
    assert vit_cost(np.asarray([100]), np.asarray([0.0]), CostConfig(vit_linear=0.5)).tolist() == [51200]


def test_coefficients_of_a_known_model():
    costs = costs_of_model({"text_config": TEXT, "vision_config": VISION})
    # By hand: 28 * (3584*128*64 + 3*3584*18944) + 3584*152064 multiply-adds a token, 28 * 3584 per squared token;
    # 32 * (4*1280^2 + 3*1280*3420) a patch, 4 * 2 * 1280 per squared patch.
    token = 28 * (3584 * 128 * 64 + 3 * 3584 * 18944) + 3584 * 152064
    assert costs.llm_linear == 1
    assert costs.llm_square == pytest.approx(28 * 3584 / token)
    assert costs.vit_linear == pytest.approx(32 * (4 * 1280**2 + 3 * 1280 * 3420) / token)
    assert costs.vit_square == pytest.approx(4 * 2 * 1280 / token)


def test_objects_experts_and_other_names():
    text = SimpleNamespace(**TEXT, num_experts_per_tok=8, moe_intermediate_size=768)
    dense = costs_of_model(SimpleNamespace(text_config=SimpleNamespace(**TEXT)))
    sparse = costs_of_model(SimpleNamespace(text_config=text, vision_config=None))
    assert sparse.llm_square > dense.llm_square
    assert sparse.vit_linear == 0
    # One width for the tower, one for what it hands on.
    named = costs_of_model(
        {**TEXT, "vision_config": {"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "mlp_ratio": 4}}
    )
    wide = costs_of_model(
        {**TEXT, "vision_config": {"hidden_size": 1280, "num_hidden_layers": 32, "intermediate_size": 5120}}
    )
    assert named == wide


def test_a_real_config_object_is_understood():
    from transformers import Qwen2_5_VLConfig

    config = Qwen2_5_VLConfig()
    costs = costs_of_model(config)
    assert 0 < costs.vit_linear < 1
    assert 0 < costs.llm_square < 1e-3


def test_refusals():
    with pytest.raises(ConfigError, match="The model config has no 'hidden_size'"):
        costs_of_model({"vision_config": VISION})
    with pytest.raises(ConfigError, match="cannot be balanced"):
        CostConfig(llm_linear=-1)
    with pytest.raises(ConfigError, match="cannot be balanced"):
        CostConfig(llm_linear=0, llm_square=0, vit_linear=0, vit_square=0)
