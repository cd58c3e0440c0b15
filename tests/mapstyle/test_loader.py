"""The loader in one call: stages, samplers, templates, refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from vlm_stream.collate import PackingContract, pad_collate_fn
from vlm_stream.errors import ConfigError
from vlm_stream.mapstyle import (
    BalancedPackSampler,
    NeatPackConfig,
    PreTokenizedDatasetWrapperConfig,
    VlmCollatorConfig,
    VlmDataloaderConfig,
    VlmProcessorConfig,
    VlmVideoProcessorConfig,
    read_chat_template,
    set_image_pixel_bounds,
)
from vlm_stream.sources import MetaDatasetConfig
from vlm_stream.testing import build_processor

if TYPE_CHECKING:
    from pathlib import Path

    Samples = list[dict[str, Any]]

# torchdata calls a function that torch 2.13 has deprecated, at the construction of every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
BUILD = {"dp_rank": 0, "dp_world_size": 1, "batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, processor: Any) -> str:
    where = tmp_path_factory.mktemp("processor")
    processor.save_pretrained(where)
    return str(where)


def config(samples: Samples, **options: Any) -> VlmDataloaderConfig:
    return VlmDataloaderConfig(SimpleNamespace(build=lambda: samples), **{"shuffle": False} | options)


def encoded(samples: Samples, **packing: Any) -> VlmDataloaderConfig:
    return config(samples, pretokenization=PreTokenizedDatasetWrapperConfig(), packing=NeatPackConfig(**packing))


def batches(of: VlmDataloaderConfig, folder: str, **build: Any) -> list[dict[str, Any]]:
    return list(of.build(pretrained_model_name_or_path=folder, **BUILD | build).dataloader)


def test_each_stage_has_its_collate_function(samples: Samples, folder: str) -> None:
    raw = batches(config(samples), folder)
    pretokenization = PreTokenizedDatasetWrapperConfig(inject_fake_images=False)
    padded = batches(config(samples, pretokenization=pretokenization), folder)
    assert [batch["input_ids"].shape for batch in raw] == [batch["input_ids"].shape for batch in padded]
    assert torch.equal(raw[1]["labels"], padded[1]["labels"])
    own = VlmCollatorConfig(pad_collate_fn, {"max_length": 300})
    fixed = batches(config(samples, pretokenization=pretokenization, collator=own), folder)
    assert {batch["input_ids"].shape[1] for batch in fixed} == {299}


def test_masks_of_packs(samples: Samples, folder: str) -> None:
    packs = encoded(samples, pack_size=400)
    assert all(batch["attention_mask"].ndim == 4 for batch in batches(packs, folder))
    assert all(batch["attention_mask"].ndim == 2 for batch in batches(packs, folder, cp_size=2))
    flash = batches(packs, folder, packing_attn_implementation="flash_attention_3")
    assert all("attention_mask" not in batch and "cu_seq_lens_q" in batch for batch in flash)
    numbers = batches(packs, folder, packing_contract=PackingContract("document_ids", True))
    assert all(batch["attention_mask"].ndim == 2 and "packed_token_indices" in batch for batch in numbers)
    thd = batches(encoded(samples, pack_size=400, packing_format="thd"), folder, cp_size=2)
    assert all(int(n) % 4 == 0 for batch in thd for row in batch["seq_lens_padded"] for n in row[row >= 0])
    staged = batches(packs, folder, pp_n_microbatches=1)
    assert any("_vlm_pp_media_chunks" in batch for batch in staged)
    assert not any("pixel_values" in batch for batch in staged)


def test_shuffled_packs_stay_balanced_and_state_is_kept(samples: Samples, folder: str) -> None:
    packs = encoded(samples * 4, pack_size=250)
    packs.shuffle = True
    loader = packs.build(pretrained_model_name_or_path=folder, **BUILD).dataloader
    assert isinstance(loader.sampler, BalancedPackSampler)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch["input_ids"].tolist() for batch in iterator]
    again = packs.build(pretrained_model_name_or_path=folder, **BUILD).dataloader
    again.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in again] == rest
    with pytest.raises(ConfigError, match="do not give each of 900 ranks"):
        packs.build(pretrained_model_name_or_path=folder, **BUILD | {"dp_world_size": 900})


def test_shares_of_ranks_are_visited_whole(tmp_path: Path, folder: str) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": str(n)}]} for n in range(7)
    ]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    (tmp_path / "meta.json").write_text(json.dumps({"d": {"file_name": "d.json"}}))
    for shard_data in (True, False):
        data = MetaDatasetConfig(str(tmp_path / "meta.json"), shard_data=shard_data)
        collator = VlmCollatorConfig(lambda examples, processor: examples)
        seen = []
        for rank in range(2):
            build = BUILD | {"dp_rank": rank, "dp_world_size": 2, "batch_size": 1}
            made = VlmDataloaderConfig(data, collator=collator).build(pretrained_model_name_or_path=folder, **build)
            assert made.dataloader.sampler.shuffle
            seen += [e["conversation"][1]["content"][0]["text"] for batch in made.dataloader for e in batch]
        assert set(seen) == set("0123456")


def test_templates(tmp_path: Path, samples: Samples, folder: str) -> None:
    text = "{% for m in messages %}{{ m.role }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(text)
    (tmp_path / "t.json").write_text(json.dumps({"chat_template": text}))
    (tmp_path / "n.json").write_text("[]")
    assert {read_chat_template(str(given)) for given in (text, tmp_path / "t.jinja", tmp_path / "t.json")} == {text}
    with pytest.raises(ConfigError, match="has no 'chat_template'"):
        read_chat_template(str(tmp_path / "n.json"))
    with pytest.raises(ConfigError, match="neither Jinja text nor a file"):
        read_chat_template("qwen")
    made = config(samples, chat_template=text).build(pretrained_model_name_or_path=folder, **BUILD)
    assert made.processor.chat_template == made.processor.tokenizer.chat_template == text


def test_processors(samples: Samples, folder: str) -> None:
    video = VlmVideoProcessorConfig(lambda **given: given, {"fps": 1})
    made = VlmProcessorConfig(lambda **given: given, {"a": 1}, video).build(pretrained_model_name_or_path="m")
    assert made == {"a": 1, "video_processor": {"pretrained_model_name_or_path": "m", "fps": 1}}
    with pytest.raises(ConfigError, match="cannot be loaded"):
        batches(config(samples), "/nowhere")
    own = VlmCollatorConfig(lambda examples, processor: {"none": processor})
    assert batches(config(samples, collator=own), "/nowhere")[0] == {"none": None}
    tokens = SimpleNamespace(accepts_tokenizer=True, build=lambda tokenizer: [type(tokenizer).__name__])
    words = batches(
        VlmDataloaderConfig(tokens, collator=VlmCollatorConfig(lambda examples, processor: examples)), folder
    )
    assert "Token" in words[0][0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"packing": NeatPackConfig()}, "nothing encodes them"),
        ({"dataset_config": SimpleNamespace(build=lambda: iter([]))}, "without a length"),
    ],
)
def test_refusals(samples: Samples, folder: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        batches(VlmDataloaderConfig(**{"dataset_config": SimpleNamespace(build=lambda: samples)} | options), folder)


def test_packing_configs() -> None:
    with pytest.raises(ConfigError, match=r"Unsupported VLM packing_format 'thx'.*did you mean 'thd'"):
        NeatPackConfig(packing_format="thx")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no multiple of 8"):
        NeatPackConfig(packing_format="thd", collate_max_length=66).alignment(4)
    with pytest.raises(ConfigError, match="cp_size is 0"):
        NeatPackConfig().alignment(0)
    assert [NeatPackConfig(packing_format=form).alignment(4) for form in ("neat", "thd")] == [1, 8]  # type: ignore[arg-type]


def test_pixel_bounds_reach_the_image_processor() -> None:
    processor = build_processor("qwen2_5_vl")
    set_image_pixel_bounds(processor, max_pixels=56 * 56, min_pixels=28 * 28)
    image = torch.zeros(3, 280, 280, dtype=torch.uint8)
    grid = processor.image_processor(images=[image], return_tensors="pt")["image_grid_thw"]
    assert grid.tolist() == [[1, 4, 4]]
    set_image_pixel_bounds(SimpleNamespace(), max_pixels=1)
