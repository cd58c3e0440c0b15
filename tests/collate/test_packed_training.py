"""Packed samples train the model as the same samples one by one do: summed loss and every gradient, to 1e-5."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from vlm_stream.collate import (
    ModelPositions,
    PositionRule,
    build_hf_pack,
    build_packed_vlm_sample,
    join_hf_packs,
    neat_packed_vlm_collater,
    shift_sample,
)
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.keys import PIXEL_KEYS

log = logging.getLogger(__name__)
Kinds = Callable[[str], dict[str, dict[str, Any]]]
Models = Callable[[str, str], Any]
TOKENS = ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
REAL = ("image", "images", "video", "mixed", "text", "short")
EXACT = 1e-5
SETUPS = [
    (family, impl, form)
    for family in ("qwen2_5_vl", "qwen3_vl")
    for impl, form in (("sdpa", "positions"), ("eager", "positions"), ("sdpa", "mask4d_bool"), ("eager", "mask4d"))
]


def alone(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value[None] if key in TOKENS else value for key, value in sample.items()}


def train(model: Any, batches: Iterable[Mapping[str, Any]], **more: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the summed loss over batches, and the gradients that they leave together."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=1, **{"use_cache": False, **more}).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]) -> float:
    """Return the largest relative difference: of the loss, or of any parameter's gradient."""
    assert one[1].keys() == other[1].keys()
    grads = [float((g - other[1][name]).norm() / g.norm()) for name, g in one[1].items() if g.norm() > 0]
    assert len(grads) > 20
    return max(abs(one[0] - other[0]) / one[0], *grads)


@pytest.mark.parametrize("hf_labels", [True, False], ids=["hf", "shifted"])
@pytest.mark.parametrize("rule", [PositionRule(merge_size=2, frames_apart=False, tokens_per_second=2.0), None])
@pytest.mark.parametrize("row", [("short",), ("text", "short", "text"), ("text", "image", "short"), REAL], ids="-".join)
def test_a_pack_is_its_documents_one_after_another(
    row: Iterable[str], rule: PositionRule | None, hf_labels: bool, kinds: Kinds
) -> None:
    """Bit for bit, whatever is computed once for a pack; and padding is one more document."""
    samples = [kinds("qwen2_5_vl")[kind] for kind in row]
    packs = [build_hf_pack([sample], positions=rule, hf_labels=hf_labels) for sample in samples]
    length = sum(pack["input_ids"].shape[1] for pack in packs)
    pack = build_hf_pack(samples, positions=rule, hf_labels=hf_labels)
    padded = build_hf_pack(samples, positions=rule, hf_labels=hf_labels, pad_to=length + 5, padding_idx=7)
    for key in ("input_ids", "labels", "mm_token_type_ids", "position_ids"):
        assert torch.equal(pack[key], torch.cat([each[key] for each in packs], dim=-1))
        assert pack[key].is_contiguous()
        assert torch.equal(padded[key][..., :length], pack[key])
    fills = (padded[key][..., length:].unique().tolist() for key in ("input_ids", "labels", "mm_token_type_ids"))
    assert [*fills, padded["position_ids"][..., length:].unique().tolist()] == [[7], [-100], [0], [0, 1, 2, 3, 4]]
    for sample, each in zip(samples, packs, strict=True):
        ends = ([-100], sample["labels"][1:].tolist())
        assert each["labels"][0].tolist() == [label for end in (ends if hf_labels else ends[::-1]) for label in end]


@pytest.mark.parametrize(("family", "impl", "form"), SETUPS)
def test_a_pack_trains_as_its_samples_one_by_one(
    family: str, impl: str, form: str, kinds: Kinds, model: Models
) -> None:
    net, samples = model(family, impl), [kinds(family)[kind] for kind in REAL]
    pack = build_hf_pack(samples, positions=PositionRule.from_config(net.config), pad_to=700, attention=form)
    assert pack["input_ids"].shape == (1, 700)
    difference = worst(train(net, map(alone, samples)), train(net, [pack]))
    log.info("largest relative difference of loss and gradients: %.1e", difference)
    assert difference < EXACT


@pytest.mark.parametrize(("family", "impl", "form"), SETUPS)
def test_a_batch_of_packs_trains_as_its_samples_one_by_one(
    family: str, impl: str, form: str, kinds: Kinds, model: Models
) -> None:
    net, samples = model(family, impl), kinds(family)
    rows = [("image", "text", "mixed"), ("short",), ("video", "images")]
    positions = ModelPositions(net.model.get_rope_index)
    packs = [build_hf_pack([samples[k] for k in row], positions=positions, attention=form) for row in rows]
    batch = join_hf_packs(packs, padding_idx=3)
    assert batch["position_ids"].shape == (4, 3, max(pack["input_ids"].shape[1] for pack in packs))
    singles = [alone(samples[kind]) for row in rows for kind in row]
    assert worst(train(net, singles), train(net, [batch])) < EXACT


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_check_sees_documents_that_leak(family: str, impl: str, kinds: Kinds, model: Models) -> None:
    net, samples = model(family, impl), [kinds(family)[kind] for kind in REAL]
    pack = build_hf_pack(samples, positions=PositionRule.from_config(net.config))
    truth = train(net, map(alone, samples))
    assert worst(truth, train(net, [pack])) < EXACT
    three_rows = pack | {"position_ids": pack["position_ids"][1:]}
    assert worst(truth, train(net, [three_rows])) > 100 * EXACT
    assert worst(truth, train(net, [pack], use_cache=True)) > 100 * EXACT
    one_document = torch.ones(1, 1, *[pack["input_ids"].shape[1]] * 2).tril().log().clamp(min=-1e30)
    assert worst(truth, train(net, [pack | {"attention_mask": one_document}])) > 100 * EXACT


@pytest.mark.parametrize(("family", "impl", "form"), SETUPS)
def test_fake_images_are_not_seen(family: str, impl: str, form: str, kinds: Kinds, model: Models) -> None:
    net, samples = model(family, impl), kinds(family)
    positions = PositionRule.from_config(net.config)
    pack = build_hf_pack([samples["faked"], samples["short"], samples["faked"]], positions=positions, attention=form)
    assert len(pack["image_grid_thw"]) == 1  # one is enough for the vision tower to run
    loss, grads = train(net, [pack])
    without = train(net, map(alone, [samples["text"], samples["short"], samples["text"]]))
    vision = {name: grads.pop(name) for name in list(grads) if ".visual." in name}
    assert vision
    assert all(not g.any() for g in vision.values())
    assert worst(without, (loss, grads)) < EXACT


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_document_masks_of_packed_samples_train_the_same(family: str, kinds: Kinds, model: Models) -> None:
    """The other way to a batch: shifted samples, document numbers, the collater's mask, aligned documents."""
    net = model(family, "sdpa")
    # The collater gives pixels in bfloat16: what is compared gets the same ones.
    samples = {
        kind: {k: v.bfloat16().float() if k in PIXEL_KEYS else v for k, v in sample.items()}
        for kind, sample in kinds(family).items()
    }
    rule = PositionRule.from_config(net.config)
    rows = [("faked", "images", "video"), ("short", "faked")]
    packs = [
        build_packed_vlm_sample(
            [shift_sample(samples[k] | {"position_ids": rule(samples[k])}, True) for k in row], 512, 3, True, 8
        )
        for row in rows
    ]
    batch = neat_packed_vlm_collater(packs, padding_idx=3, max_length=512)
    labels = batch.pop("labels")
    net.zero_grad(set_to_none=True)
    inputs = {k: v for k, v in batch.items() if not k.startswith(("_", "n_"))}
    loss = cross_entropy(net(**inputs, use_cache=False).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    packed = loss.item(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    singles = [alone(samples[k.replace("faked", "text")]) for row in rows for k in row]
    assert worst(train(net, singles), packed) < EXACT


def test_real_media_make_the_fake_image_needless(kinds: Kinds, model: Models) -> None:
    samples = kinds("qwen2_5_vl")
    positions = PositionRule.from_config(model("qwen2_5_vl", "sdpa").config)
    pack = build_hf_pack([samples["faked"], samples["video"]], positions=positions)
    assert "pixel_values" not in pack
    assert pack["input_ids"].shape[1] == len(samples["text"]["input_ids"]) + len(samples["video"]["input_ids"])


def test_the_loss_is_the_one_computed_by_hand(kinds: Kinds, model: Models) -> None:
    """Labels are shifted once: by the model for `hf_labels`, by us otherwise."""
    net, samples = model("qwen2_5_vl", "sdpa"), [kinds("qwen2_5_vl")[kind] for kind in REAL]
    positions = PositionRule.from_config(net.config)
    pack = build_hf_pack(samples, positions=positions, pad_to=600)
    shifted = build_hf_pack(samples, positions=positions, pad_to=600, hf_labels=False)
    with torch.no_grad():
        out = net(**pack, use_cache=False, num_items_in_batch=1)
        by_hand = 0.0
        for sample in samples:
            logits = net(**{key: value for key, value in alone(sample).items() if key != "labels"}).logits[0]
            by_hand += float(cross_entropy(logits[:-1], sample["labels"][1:], reduction="sum"))
        ours = float(cross_entropy(out.logits[0], shifted["labels"][0], reduction="sum"))
    assert out.loss.item() == pytest.approx(by_hand, rel=EXACT)
    assert ours == pytest.approx(by_hand, rel=EXACT)


def test_no_document_answers_for_the_next(kinds: Kinds) -> None:
    samples = [dict(kinds("qwen2_5_vl")[kind]) for kind in ("text", "short", "text")]
    for sample in samples:
        sample["labels"] = sample["input_ids"].clone()
    pack = build_hf_pack(samples)
    starts = (pack["position_ids"][0] == 0).nonzero()[:, 0]
    assert len(starts) == 3
    assert (pack["labels"][0, starts] == -100).all()
    assert (pack["labels"] != -100).sum() == sum(len(s["input_ids"]) - 1 for s in samples)
    shifted = build_hf_pack(samples, hf_labels=False)
    assert (shifted["labels"][0, [*(starts[1:] - 1), -1]] == -100).all()


def test_plain_families_get_one_row_of_positions(kinds: Kinds) -> None:
    samples = [kinds("qwen2_5_vl")[kind] for kind in ("text", "short")]
    pack = build_hf_pack(samples, pad_to=130)
    lengths = [len(s["input_ids"]) for s in samples]
    lengths.append(130 - sum(lengths))
    assert pack["position_ids"].tolist() == [[i for n in lengths for i in range(n)]]
    assert "attention_mask" not in pack
    batch = join_hf_packs([pack, build_hf_pack(samples[1:])])
    assert batch["position_ids"].shape == batch["input_ids"].shape == (2, 130)


def test_media_counts_for_pipelines(kinds: Kinds) -> None:
    samples = kinds("qwen2_5_vl")
    packs = [build_hf_pack([samples[k] for k in row]) for row in (("images", "mixed"), ("text",), ("video", "image"))]
    batch = join_hf_packs(packs, media_counts=True)
    assert batch["n_images_per_sample"].tolist() == [4, 0, 1]
    assert batch["n_videos_per_sample"].tolist() == [2, 0, 1]
    assert len(batch["second_per_grid_ts"]) == 3
    text = join_hf_packs(packs[1:2], media_counts=True)
    assert "n_images_per_sample" not in text


def test_misfits_are_refused(kinds: Kinds) -> None:
    samples = kinds("qwen2_5_vl")
    with pytest.raises(BadSampleError, match="None of the 0 samples of a pack has a token") as empty:
        build_hf_pack([])
    assert (empty.value.stage, empty.value.reason) == ("fit", "empty_pack")
    with pytest.raises(BadSampleError, match=r"documents of a pack have \d+ tokens, more than the 20 of its row"):
        build_hf_pack([samples["text"]], pad_to=20)
    with pytest.raises(ConfigError, match="'mask4' is no way to keep documents apart; did you mean 'mask4d'"):
        build_hf_pack([samples["text"]], attention="mask4")
    with pytest.raises(ConfigError, match="position rule gave 2 rows per token"):
        build_hf_pack([samples["text"]], positions=lambda sample: torch.zeros(2, len(sample["input_ids"])))
    half = samples["images"] | {"attention_mask": samples["images"]["attention_mask"].clone()}
    half["attention_mask"][5] = 0
    with pytest.raises(BadSampleError, match="hides 1 tokens and shows media tokens"):
        build_hf_pack([half])
    with pytest.raises(ConfigError, match="no packs cannot be made"):
        join_hf_packs([])
    packs = [build_hf_pack([samples["text"]], attention=form) for form in ("positions", "mask4d")]
    with pytest.raises(ConfigError, match=r"hold different model inputs .*attention_mask.* against"):
        join_hf_packs(packs)
    with pytest.raises(BadSampleError, match="more than the 8 of its batch's rows"):
        join_hf_packs(packs[:1], pad_to=8)
