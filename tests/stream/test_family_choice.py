"""Which family and form a run has: what is refused at the start, families of one's own, the packed forms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.remote_processors import build_stand_in
from vlm_stream.collate import (
    COLLATE_FNS,
    default_collate_fn,
    families,
    family_of,
    find_family,
    get_collate,
    phi4_mm_collate_fn,
    register_collate,
)
from vlm_stream.convert import make_shards
from vlm_stream.encode import IGNORE
from vlm_stream.errors import ConfigError
from vlm_stream.loader import StreamLoader
from vlm_stream.sources import Record, SourceGroup
from vlm_stream.testing import build_processor, make_jpeg

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
PACKED = {"pack_size": 2048, "batch_size": 2}
PLAIN = {"mode": "plain", "batch_size": 4}


def first(shards: Path, processor: Any, **options: Any) -> dict[str, Any]:
    return next(iter(StreamLoader(shards, processor=processor, **options)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"collate": "neat", **PLAIN}, r"collate='neat' joins the documents of packed rows, but mode is 'plain'"),
        ({"collate": "kimi_v", **PLAIN}, "collate='kimi_v' is no family and no form: .*kimi_vl"),
        ({"collate": "thd", "attention": "mask4d", **PACKED}, "tells documents apart by their lengths and has no mask"),
        ({"attention": "indexed", **PACKED}, "attention='indexed' is a mask of document numbers, which collate='neat'"),
        ({"collate": "nemotron_parse", **PACKED}, "'nemotron_parse'.* cannot be packed: each page .*mode='grouped'"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(options, sentence, toy_shards, processor):
    with pytest.raises(ConfigError, match=sentence):
        iter(StreamLoader(toy_shards, processor=processor, **options)).__next__()


def test_both_names_of_the_option(toy_shards, processor):
    with pytest.raises(ConfigError, match="collate_fn is another name of collate"):
        StreamLoader(toy_shards, processor=processor, collate="auto", collate_fn=len, **PLAIN)
    assert StreamLoader(toy_shards, processor=processor, collate_fn=len, **PLAIN).options.collate is len


def test_a_tokenizer_is_no_processor(toy_shards, processor):
    with pytest.raises(ConfigError, match=r"which reads text alone, and \d+ of the 60 samples .*AutoProcessor"):
        first(toy_shards, processor.tokenizer, **PLAIN)


def test_neat_rows_tell_documents_apart_in_each_form(toy_shards, processor):
    ours = first(toy_shards, processor, **PACKED, hf_labels=False)
    masks = {
        form: first(toy_shards, processor, collate="neat", attention=form, **PACKED)
        for form in ("positions", "mask4d", "indexed")
    }
    for form, batch in masks.items():
        assert {"_packed_seq_ids", "seq_lens", "seq_lens_padded", "n_images_per_sample"} <= set(batch)
        assert batch["pixel_values"].dtype == torch.bfloat16
        for row, numbers in enumerate(batch["_packed_seq_ids"]):
            counts = torch.bincount(numbers)[1:].tolist()
            assert [n for n in batch["seq_lens"][row].tolist() if n] == counts
        learned = [batch["labels"][row][batch["labels"][row] != IGNORE].tolist() for row in range(2)]
        assert learned == [ours["labels"][row][ours["labels"][row] != IGNORE].tolist() for row in range(2)], form
    size = masks["indexed"]["input_ids"].shape[1]
    assert masks["indexed"]["attention_mask"].tolist() == masks["indexed"]["_packed_seq_ids"].tolist()
    assert masks["positions"]["attention_mask"].shape == (2, 1, size, size)
    assert masks["mask4d"]["attention_mask"].dtype == torch.float32
    unshifted = first(toy_shards, processor, collate="neat", hf_labels=True, **PACKED)
    inside = unshifted["labels"] != IGNORE
    assert torch.equal(unshifted["labels"][inside], unshifted["input_ids"][inside])
    lengths = first(toy_shards, processor, collate="thd", **PACKED)
    assert lengths["qkv_format"] == "thd"
    assert "attention_mask" not in lengths


def test_a_named_family_gives_the_batch_of_its_function(toy_shards, processor):
    batch = first(toy_shards, processor, collate="Qwen2_5_VLProcessor", **PLAIN)
    same = first(toy_shards, processor, collate="qwen2_5_vl", **PLAIN)
    shifted = first(toy_shards, processor, hf_labels=False, **PLAIN)
    assert torch.equal(batch["labels"], same["labels"])
    assert torch.equal(batch["labels"], shifted["labels"])
    assert batch["pixel_values"].dtype == torch.float32  # of this family; that of encoded samples is bfloat16


def test_every_family_that_the_page_lists_is_chosen_by_its_name() -> None:
    row = re.search(r"^\| by rule \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    for name in re.findall(r"`(\w+)`", row[1]):
        family = find_family(name)
        assert family.name == name
        assert all(find_family(processor) is family for processor in family.processors)


def test_a_family_without_a_function_of_its_own_gives_the_batch_of_the_default_one(tmp_path):
    gemma = build_processor("gemma3", image={"size": {"height": 56, "width": 56}})
    turns = [[{"type": "image", "image": make_jpeg(40, 50)}, {"type": "text", "text": "What?"}], "It."]
    roles = [{"role": role, "content": content} for role, content in zip(("user", "assistant"), turns, strict=True)]
    record = Record(source="one", id="0", origin="one:0", conversation=roles)
    make_shards(SourceGroup([Listed([record])], name="one"), tmp_path / "out", processor=gemma)
    named = first(tmp_path / "out", gemma, collate="gemma3", **PLAIN)
    same = first(tmp_path / "out", gemma, collate="default", **PLAIN)
    assert named.keys() == same.keys()
    assert all(torch.equal(value, named[key]) for key, value in same.items() if isinstance(value, torch.Tensor))
    assert "Gemma3Processor" not in COLLATE_FNS  # as in NeMo Automodel, whose table has no such key
    assert get_collate(gemma) is COLLATE_FNS["default"]


class Listed:
    """Records of a list."""

    name = "one"

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int) -> Record:
        return self._records[index]


def joined(examples: list[dict[str, Any]], processor: Any) -> dict[str, Any]:
    return default_collate_fn(examples, processor) | {"mine": len(examples)}


def test_a_registered_function_is_given_conversations(toy_shards, processor):
    name = type(processor).__name__
    expected = first(toy_shards, processor, collate="default", **PLAIN)
    register_collate(name)(joined)
    try:
        assert COLLATE_FNS[name] is joined
        batch = first(toy_shards, processor, **PLAIN)
        with pytest.raises(ConfigError, match="its registered function takes conversations"):
            first(toy_shards, processor, **PACKED)
    finally:
        del COLLATE_FNS[name]
    assert batch["mine"] == 4
    assert torch.equal(batch["labels"], expected["labels"])
    assert COLLATE_FNS[name] is not joined


def test_the_example_of_the_page_runs(toy_shards, processor):
    page = PAGE.read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
    scope: dict[str, Any] = {}
    exec(example, scope)
    try:
        batch = first(toy_shards, processor, collate="captioner", with_refs=True, bad_budget=None, **PLAIN)
    finally:
        del families._FAMILIES["captioner"]
    assert batch["task"] == "caption"
    text = processor.tokenizer.decode(batch["input_ids"][0])
    assert "user: " in text
    assert "<|im_start|>" not in text


@pytest.mark.parametrize("build", [lambda: build_processor("phi4_multimodal"), lambda: build_stand_in("phi4_mm")])
def test_phi4_takes_audio_that_the_text_places(build):
    processor = build()
    wave = np.sin(np.arange(8000) / 20).astype(np.float32)
    turns = [{"role": "user", "content": "<|endoftext11|>Write it."}, {"role": "assistant", "content": "A tone."}]
    batch = phi4_mm_collate_fn([{"conversation": turns, "audio": (wave, 16000)}], processor)
    text = processor.tokenizer.decode(batch["input_ids"][0])
    tokens = {"<|endoftext11|>", "<|audio|>"}
    assert sum(text.count(token) for token in tokens) > 0
    assert re.sub("|".join(map(re.escape, tokens)), "", text).startswith("<|user|>Write it.")
    assert batch["input_mode"].tolist() == [2]


@pytest.mark.parametrize("family", ["qwen3_omni_moe", "nemotron_h_omni"])
def test_audio_beside_a_conversation_is_heard(family):
    processor = build_processor(family)
    wave = np.sin(np.arange(8000) / 20).astype(np.float32)
    turns = [{"role": "user", "content": "Write it."}, {"role": "assistant", "content": "A tone."}]
    collate = COLLATE_FNS[type(processor).__name__]
    batch = collate([{"conversation": turns, "audio": {"array": wave, "sampling_rate": 16000}}], processor)
    assert len(batch["input_features"]) == 1
    assert family_of(processor).name == family
