"""The config-only position rule equals what the models themselves compute."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.collate import ModelPositions, PositionRule, WeightlessPositions, compute_mrope_position_ids
from vlm_stream.collate.positions import _CLIP_FAMILIES, _FRAME_FAMILIES
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.testing import build_processor

if TYPE_CHECKING:
    from collections.abc import Callable

MERGE = 2


def make_sample(frames_apart: bool, parts: list[tuple[str, int, int, int]]) -> dict[str, Any]:
    """Lay out text and media as the family's processor does; ids other than the media's are 50."""
    ids: list[int] = []
    types: list[int] = []
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}

    def put(n: int, token: int, kind: int) -> None:
        ids.extend([token] * n)
        types.extend([kind] * n)

    put(1, 50, 0)
    for what, t, h, w in parts:
        if what == "text":
            put(t, 50, 0)
            continue
        frames = t if what == "video" else 1
        grids[what].append([frames, h * MERGE, w * MERGE])
        kind = 1 if what == "image" else 2
        runs = [h * w] * frames if frames_apart else [frames * h * w]
        for run in runs:  # Qwen3-VL writes a timestamp before every frame
            put(run, 900 + kind, kind)
            put(1, 50, 0)
    sample: dict[str, Any] = {"input_ids": torch.tensor(ids), "mm_token_type_ids": torch.tensor(types)}
    for what, rows in grids.items():
        if rows:
            sample[f"{what}_grid_thw"] = torch.tensor(rows)
    return sample


PARTS = st.lists(
    st.tuples(st.sampled_from(["text", "image", "video"]), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    max_size=6,
)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@settings(max_examples=60, deadline=None)
@given(parts=PARTS, seconds=st.lists(st.floats(0.05, 3.0), min_size=6, max_size=6), hidden=st.integers(0, 3))
def test_rule_equals_the_model(
    family: str, parts: list[tuple[str, int, int, int]], seconds: list[float], hidden: int, model: Callable[..., Any]
) -> None:
    net = model(family, "sdpa")
    sample = make_sample(family == "qwen3_vl", parts)
    if "video_grid_thw" in sample and family == "qwen2_5_vl":
        sample["second_per_grid_ts"] = torch.tensor(seconds)[: len(sample["video_grid_thw"])]
    mask = torch.ones_like(sample["input_ids"])
    mask[len(mask) - min(hidden, len(mask) - 1) :] = 0  # right padding; the first token is text
    if (sample["mm_token_type_ids"][mask == 0] == 0).all():
        sample["attention_mask"] = mask
    rule = PositionRule.from_config(net.config)
    assert rule is not None
    expected = compute_mrope_position_ids(sample, net.model.get_rope_index)
    assert torch.equal(rule(sample), expected)
    assert torch.equal(ModelPositions(net.model.get_rope_index)(sample), expected)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_rule_equals_the_model_on_real_samples(
    family: str, kinds: Callable[..., Any], model: Callable[..., Any], processor: Callable[..., Any]
) -> None:
    net = model(family, "sdpa")
    rules = [
        PositionRule.from_config(net.config),
        PositionRule.from_config(net.config.to_dict()),
        PositionRule.from_processor(processor(family)),
    ]
    for sample in kinds(family).values():
        expected = compute_mrope_position_ids(sample, net.model.get_rope_index)
        bare = {key: value for key, value in sample.items() if key != "mm_token_type_ids"}
        for rule in rules:
            assert torch.equal(rule(sample), expected)
            assert torch.equal(rule(bare), expected)
        assert torch.equal(compute_mrope_position_ids(bare, net.model.get_rope_index), expected)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_class_without_weights_gives_the_same(
    family: str, kinds: Callable[..., Any], model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions place clips by other rules, which only their own code knows."""
    net = model(family, "sdpa")
    monkeypatch.setattr("transformers.__version__", "5.17.2")
    rule = PositionRule.from_config(net.config)
    assert isinstance(rule, PositionRule if family == "qwen3_vl" else WeightlessPositions)
    weightless = pickle.loads(pickle.dumps(WeightlessPositions.find(net.config)))
    from_json = WeightlessPositions.find(net.config.to_dict())
    for sample in kinds(family).values():
        expected = compute_mrope_position_ids(sample, net.model.get_rope_index)
        assert torch.equal(weightless(sample), expected)
        assert torch.equal(from_json(sample), expected)


def test_families_without_a_rule_here_use_their_own_class() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("ernie4_5_vl_moe")
    config.text_config.rope_parameters = {"mrope_section": [1, 1, 1]}
    rule = PositionRule.from_config(config)
    assert isinstance(rule, WeightlessPositions)
    sample = make_sample(False, [("text", 3, 0, 0), ("image", 1, 2, 3), ("text", 2, 0, 0)])
    assert rule(sample).shape == (3, len(sample["input_ids"]))


ALL_PARTS = [("text", 3, 0, 0), ("image", 1, 2, 3), ("video", 3, 2, 2), ("text", 4, 0, 0), ("video", 2, 3, 1)]


@pytest.mark.parametrize("family", [*_CLIP_FAMILIES, *_FRAME_FAMILIES])
def test_every_rule_here_is_that_of_its_class(family: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    config.vision_config.spatial_merge_size = MERGE
    rule = PositionRule.from_config(config)
    assert isinstance(rule, PositionRule)
    sample = make_sample(rule.frames_apart, ALL_PARTS)
    assert torch.equal(rule(sample), WeightlessPositions.find(config)(sample))


def test_a_processor_does_not_know_older_rules(processor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    assert PositionRule.from_processor(processor("qwen3_vl")) is not None
    with pytest.raises(ConfigError, match="places the videos of qwen2_5_vl by another rule"):
        PositionRule.from_processor(processor("qwen2_5_vl"))


def test_processors_of_families_without_a_rule_do_not_pass_for_plain_ones() -> None:
    ernie = type("Ernie4_5_VLMoeProcessor", (), {})()
    with pytest.raises(ConfigError, match="Ernie4_5_VLMoeProcessor belongs to a family with multi-axis positions"):
        PositionRule.from_processor(ernie)
    assert PositionRule.from_processor(build_processor("gemma3")) is None
    assert PositionRule.from_processor(build_processor("glm46v")).frames_apart


def test_media_that_touch_are_told_apart() -> None:
    rule = PositionRule(merge_size=1, frames_apart=False)
    grids = torch.tensor([[1, 2, 2], [1, 1, 2]])
    sample = {"input_ids": torch.zeros(7), "mm_token_type_ids": torch.tensor([1] * 6 + [0]), "image_grid_thw": grids}
    assert rule(sample).tolist() == [[0, 0, 0, 0, 2, 2, 4], [0, 0, 1, 1, 2, 2, 4], [0, 1, 0, 1, 2, 3, 4]]


def test_tokens_without_a_grid_are_a_bad_sample() -> None:
    rule = PositionRule(merge_size=1, frames_apart=False)
    sample = {"input_ids": torch.zeros(3), "mm_token_type_ids": torch.tensor([0, 1, 1])}
    with pytest.raises(BadSampleError, match="2 image tokens in a row, and no image grid is left"):
        rule(sample)
    with pytest.raises(BadSampleError, match="2 image tokens in a row, and the next image grid stands for 4"):
        rule(sample | {"image_grid_thw": torch.tensor([[1, 2, 2]])})


def test_families() -> None:
    assert PositionRule.from_config({"model_type": "internvl", "text_config": {"rope_scaling": None}}) is None
    assert PositionRule.from_processor(object()) is None
    strange = {"model_type": "someone_vl", "text_config": {"rope_parameters": {"mrope_section": [1, 1, 1]}}}
    with pytest.raises(ConfigError, match=r"'someone_vl' has multi-axis positions .* Pass ModelPositions"):
        PositionRule.from_config(strange)
    with pytest.raises(ConfigError, match="merge_size is 0"):
        PositionRule(merge_size=0, frames_apart=True)


def test_callbacks_of_every_signature() -> None:
    sample = {"input_ids": torch.arange(4), "attention_mask": torch.ones(4), "second_per_grid_ts": [0.5]}
    seen: dict[str, Any] = {}

    def old(
        input_ids: Any = None, image_grid_thw: Any = None, second_per_grid_ts: Any = None, attention_mask: Any = None
    ) -> Any:
        seen.update(ids=input_ids, seconds=second_per_grid_ts, mask=attention_mask)
        return torch.zeros(3, 1, 4), None

    def omni(input_ids: Any = None, second_per_grids: Any = None, **kwargs: Any) -> Any:
        seen.update(omni=second_per_grids, more=kwargs)
        return torch.ones(3, 4)

    assert compute_mrope_position_ids(sample, old).shape == (3, 4)
    assert seen["ids"].shape == seen["mask"].shape == (1, 4)
    assert seen["seconds"].tolist() == [0.5]
    assert compute_mrope_position_ids(sample, omni).shape == (3, 4)
    assert (seen["omni"].tolist(), seen["more"]) == ([0.5], {})
    assert compute_mrope_position_ids(sample, lambda tokens: None) is None
    assert compute_mrope_position_ids(sample, object()) is None
