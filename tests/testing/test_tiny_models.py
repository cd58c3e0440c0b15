"""Tiny models are real: they train on what their processor gives, and depend on the seed alone."""

from __future__ import annotations

import pytest
import torch

from vlm_stream.errors import ConfigError
from vlm_stream.testing import MODEL_FAMILIES, build_processor, build_tiny_model, make_toy_image


def encode_image(processor):
    content = [{"type": "image", "image": make_toy_image(60, 90)}, {"type": "text", "text": "What is it?"}]
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": "A."}]}]
    return processor.apply_chat_template([chat], tokenize=True, return_dict=True, return_tensors="pt")


@pytest.mark.parametrize("family", MODEL_FAMILIES)
def test_learns_from_an_image(family):
    processor = build_processor(family)
    model = build_tiny_model(family, processor)
    batch = encode_image(processor)
    loss = model(**batch, labels=batch["input_ids"].clone(), use_cache=False).loss
    loss.backward()
    assert torch.isfinite(loss)
    towers = [parameter for name, parameter in model.named_parameters() if "visual" in name or "vision" in name]
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in towers)
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_weights_depend_on_the_seed_and_leave_torch_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = (build_tiny_model("qwen2_5_vl", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    names = [name for name, parameter in first.named_parameters() if parameter.ndim > 1]
    weights = [{name: model.get_parameter(name) for name in names} for model in (first, again, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in names)
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in names)


def test_unknown_family_gets_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no tiny model of the family 'qwen3_v'.*did you mean 'qwen3_vl'"):
        build_tiny_model("qwen3_v")
