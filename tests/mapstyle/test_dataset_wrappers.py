"""Wrappers encode, replace and pack the same way in every process, and leave the data alone."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from vlm_stream.collate import PositionRule, WeightlessPositions, count_documents, neat_packed_vlm_collater
from vlm_stream.errors import ConfigError
from vlm_stream.mapstyle import (
    PackedDatasetWrapper,
    PreTokenizedDatasetWrapper,
    RobustDatasetWrapper,
    neat_pack_dataset_vlm,
)
from vlm_stream.mapstyle.wrappers import replacement_index

if TYPE_CHECKING:
    from pathlib import Path

Samples = list[dict[str, Any]]


def broken(samples: Samples, *places: int) -> Samples:
    """Return the samples with files that do not exist in some places."""
    out = copy.deepcopy(samples)
    for place in places:
        out[place]["conversation"][0]["content"].insert(0, {"type": "image", "image": f"missing-{place}.jpg"})
    return out


def test_samples_are_encoded_and_the_data_left_alone(processor: Any, samples: Samples) -> None:
    before = pickle.dumps(samples)
    encoded = PreTokenizedDatasetWrapper(samples, processor)
    assert len(encoded) == 8
    text, image = encoded[0], encoded[1]
    assert text["input_ids"].shape == text["labels"].shape == text["attention_mask"].shape
    assert (text["attention_mask"] == 0).sum() > 4  # the fake image
    assert image["attention_mask"].all()
    assert len(image["image_grid_thw"]) == 1
    assert (image["labels"] >= 0).any()
    assert pickle.dumps(samples) == before
    plain = PreTokenizedDatasetWrapper(samples, processor, inject_fake_images=False)[0]
    assert plain["attention_mask"].all()
    assert "pixel_values" not in plain


def test_long_samples_are_replaced_or_cut(processor: Any, samples: Samples) -> None:
    lengths = [len(PreTokenizedDatasetWrapper(samples, processor)[i]["input_ids"]) for i in range(8)]
    limit = sorted(lengths)[4]
    strict = PreTokenizedDatasetWrapper(samples, processor, max_length=limit)
    assert all(len(strict[i]["input_ids"]) <= limit for i in range(8))
    assert strict.ledger.by_reason() == {"encode: overlong": strict.ledger.num_bad}
    longest = lengths.index(max(lengths))
    cut = PreTokenizedDatasetWrapper(samples, processor, max_length=max(lengths) - 3, truncate=True)
    assert len(cut[longest]["input_ids"]) == max(lengths) - 3
    assert (cut[longest]["labels"] >= 0).any()
    assert cut.ledger.num_bad == 0


def test_a_hook_sees_the_batch_of_one_before_there_are_labels(processor: Any) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    data = [{"conversation": turns}]

    def double(batch: dict[str, Any], given: Any) -> dict[str, Any]:
        assert given is processor
        assert "labels" not in batch
        assert batch["input_ids"].shape[0] == 1
        return batch | {key: batch[key].repeat(1, 2) for key in ("input_ids", "attention_mask", "mm_token_type_ids")}

    plain = PreTokenizedDatasetWrapper(data, processor, inject_fake_images=False)[0]
    length = len(plain["input_ids"])
    twice = PreTokenizedDatasetWrapper(data, processor, post_tokenize_hook=double, inject_fake_images=False)[0]
    assert twice["labels"].tolist() == plain["labels"].tolist() * 2
    hooked = PreTokenizedDatasetWrapper(data, processor, length, 1, post_tokenize_hook=double, inject_fake_images=False)
    with pytest.raises(RuntimeError, match="Failed to load a valid sample after 1 retries") as failed:
        hooked[0]
    assert f"{2 * length} tokens, more than {length}" in str(failed.value.__cause__)


@pytest.mark.parametrize("workers", [0, 2])
def test_replacements_do_not_depend_on_workers(processor: Any, samples: Samples, workers: int, tmp_path: Path) -> None:
    data = broken(samples, 1, 2, 5)
    path = tmp_path / "ledger.jsonl"
    robust = RobustDatasetWrapper(data, ledger_path=str(path))
    robust.preload_media, robust.processor = True, processor
    loader = DataLoader(robust, batch_size=None, num_workers=workers, collate_fn=_first_text)
    got = list(loader)
    expected = []
    for index in range(8):
        place, attempt = index, 0
        while place in (1, 2, 5):
            place, attempt = replacement_index(index, attempt, 8), attempt + 1
        expected.append(data[place]["conversation"][0]["content"][-1]["text"])
    assert got == expected
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["reason"] for line in lines} == {"missing_member"}
    assert {"1", "2", "5"} <= {line["sample"] for line in lines}
    assert lines[0]["source"] == "RobustDatasetWrapper"


def _first_text(example: dict[str, Any]) -> str:
    return str(example["conversation"][0]["content"][-1]["text"])


def test_replacements_are_spread_and_never_the_bad_one_itself() -> None:
    counts = Counter(replacement_index(3, attempt, 10) for attempt in range(500))
    assert set(counts) == set(range(10)) - {3}
    assert replacement_index(0, 0, 1) == 0


def test_preloading_gives_copies(processor: Any, samples: Samples) -> None:
    robust = RobustDatasetWrapper(samples)
    assert robust[0] is samples[0]
    before = pickle.dumps(samples)
    robust.preload_media, robust.processor = True, processor
    faked = robust[0]
    assert faked["_injected_fake"]
    assert faked["conversation"][0]["content"][0]["image"].size == (56, 56)
    assert robust[1]["conversation"][0]["content"][0]["image"].mode == "RGB"
    assert pickle.dumps(samples) == before
    assert "_injected_fake" not in samples[0]
    robust.processor = None
    assert robust[0]["_injected_fake"]
    assert robust[1]["conversation"][0]["content"][0]["image"].mode == "RGB"
    sound = {"conversation": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]}
    shown = {"conversation": [{"role": "user", "content": [{"type": "video", "video": "v.mp4"}]}]}
    for heard in (sound, shown):
        robust = RobustDatasetWrapper([heard, samples[1]])
        robust.preload_media = True
        with pytest.raises(ConfigError, match="meets a video or sound and has no processor"):
            robust[0]


def test_hopeless_datasets_say_so(samples: Samples, processor: Any) -> None:
    encoded = PreTokenizedDatasetWrapper(broken(samples, *range(8)), processor, max_retries=3)
    with pytest.raises(RuntimeError, match=r"after 3 retries for item 4 .*missing-"):
        encoded[4]
    assert encoded.ledger.num_bad == 3


def test_packs_hold_every_sample_once(processor: Any, samples: Samples) -> None:
    encoded = PreTokenizedDatasetWrapper(samples, processor)
    rule = PositionRule.from_processor(processor)
    packs = neat_pack_dataset_vlm(
        encoded, 400, ds_raw=samples, processor=processor, get_rope_index=rule, packing_ratio=0.8, sequence_alignment=8
    )
    assert sorted(i for members in packs.bins for i in members) == list(range(8))
    items = [packs[k] for k in range(len(packs))]
    for item in items:
        assert len(item["input_ids"]) <= 400
        assert item["position_ids"].shape == (3, len(item["input_ids"]))
        assert all(n % 8 == 0 for n in item["seq_lens_padded"])
        assert count_documents(item["attention_mask"]) == item["seq_lens_padded"]
    assert sum(item["n_images"] for item in items) >= 4
    batch = packs.robust_collate(neat_packed_vlm_collater)(items)
    assert batch["position_ids"].shape == (3, len(items), batch["input_ids"].shape[1])
    assert packs.ledger.num_bad == 0


def test_a_models_method_gives_the_same_packs_as_the_rule(processor: Any, samples: Samples) -> None:
    from vlm_stream.testing import build_tiny_model

    encoded = PreTokenizedDatasetWrapper(samples, processor)
    model = build_tiny_model("qwen2_5_vl", processor)
    one = PackedDatasetWrapper(encoded, [[0, 1, 3]], 400, 0, PositionRule.from_processor(processor))[0]
    for rule in (model.model.get_rope_index, WeightlessPositions(model.config)):
        other = PackedDatasetWrapper(encoded, [[0, 1, 3]], 400, 0, rule)[0]
        assert all(torch.equal(one[k], other[k]) for k in ("input_ids", "labels", "position_ids", "pixel_values"))


def test_what_does_not_fit_is_named_and_no_pack_is_empty(processor: Any, samples: Samples) -> None:
    encoded = PreTokenizedDatasetWrapper(samples, processor, inject_fake_images=False)
    lengths = [len(encoded[i]["input_ids"]) - 1 for i in range(8)]
    longest, shortest = lengths.index(max(lengths)), lengths.index(min(lengths))
    size = lengths[shortest] + 10
    packs = PackedDatasetWrapper(encoded, [[longest, shortest], [longest], []], size)
    assert packs[0]["seq_lens"] == [lengths[shortest]]
    assert packs.ledger.by_reason() == {"fit: pack_overflow": 1}
    assert (
        f"{lengths[longest]} tokens do not fit into what is left of a pack of {size}" in packs.ledger.newest[0].detail
    )
    alone, empty = packs[1], packs[2]
    assert len(alone["input_ids"]) > 0
    assert len(empty["input_ids"]) > 0
    assert packs[1]["input_ids"].tolist() == alone["input_ids"].tolist()


def test_a_bad_sample_leaves_room_in_its_pack(processor: Any, samples: Samples) -> None:
    encoded = PreTokenizedDatasetWrapper(broken(samples, 2), processor, inject_fake_images=False)
    packs = PackedDatasetWrapper(encoded, [[0, 2, 4]], 500)
    assert len(packs[0]["seq_lens"]) == 2
    assert packs.ledger.by_reason() == {"decode: missing_member": 1}


def test_estimates_decide_what_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    raw = [{"conversation": [], "_text_tokens": n} for n in (101, 300, 51, 41)]
    kept = neat_pack_dataset_vlm(raw, 100, ds_raw=raw, drop_long_samples=True)
    assert sorted(kept.bins) == [[0], [2, 3]]
    assert "1 of 4 samples are dropped: more than 100 tokens" in caplog.text
    whole = neat_pack_dataset_vlm(raw, 100, ds_raw=raw)
    assert sorted(whole.bins) == [[0], [1], [2, 3]]
    blind = neat_pack_dataset_vlm(raw, 100)
    assert [len(members) for members in blind.bins] == [2, 2]


def test_alignment_counts_in_the_plan() -> None:
    raw = [{"conversation": [], "_text_tokens": 6}] * 3  # 5 tokens after the shift, 8 slots when aligned to 4
    assert len(neat_pack_dataset_vlm(raw, 16, ds_raw=raw)) == 1
    assert len(neat_pack_dataset_vlm(raw, 16, ds_raw=raw, sequence_alignment=4)) == 2
