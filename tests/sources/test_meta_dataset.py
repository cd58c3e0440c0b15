"""Meta files in memory: goldens of the reference, one rule for shares, sums, and what the log says."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed

from vlm_stream.errors import BadSampleError, ConfigError, SourceError
from vlm_stream.sources import (
    ExamplesWithStats,
    MetaDatasetConfig,
    collect_sample_stats,
    load_json_or_jsonl,
    load_jsonl_for_rank,
    make_meta_dataset,
)

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, name: str, num: int = 10, **more: Any) -> None:
    values = [
        {"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": "A"}], **more}
        for i in range(num)
    ]
    text = json.dumps(values) if name.endswith(".json") else "".join(json.dumps(v) + "\n" for v in values)
    (folder / name).write_text(text)


def meta(folder: Path, **entries: Any) -> str:
    (folder / "meta.json").write_text(json.dumps(entries))
    return str(folder / "meta.json")


def numbers(examples: ExamplesWithStats) -> list[int]:
    return [int(example["conversation"][0]["content"][0]["text"][1:]) for example in examples]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize(
    ("ratio", "shares"),
    [
        (1.0, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]),
        (0.6, [[1, 4, 6], [0, 9, 5]]),  # the reference's goldens for arrays, here for every format
        (1.5, [[0, 2, 4, 6, 8, 1, 4, 6], [1, 3, 5, 7, 9, 0, 9]]),  # and the last one is not lost
    ],
)
def test_one_rule_for_every_format_and_ratio(tmp_path: Path, name: str, ratio: float, shares: list[list[int]]):
    write(tmp_path, name)
    path = meta(tmp_path, a={"file_name": name, "sample_ratio": ratio})
    for rank, share in enumerate(shares):
        assert numbers(make_meta_dataset(path, shard_data=True, rank=rank, world_size=2)) == share
    whole = make_meta_dataset(path)
    assert sorted(numbers(whole)) == sorted(shares[0] + shares[1])
    # shard_data=False never shards, whatever the loader passes along
    assert numbers(make_meta_dataset(path, rank=1, world_size=2)) == numbers(whole)
    assert numbers(make_meta_dataset(path, shard_data=True, rank=0, world_size=1)) == numbers(whole)


def test_shares_go_on_over_datasets(tmp_path: Path):
    write(tmp_path, "a.jsonl", 4)
    write(tmp_path, "b.json", 3)
    path = meta(tmp_path, b={"file_name": "b.json"}, a={"file_name": "a.jsonl"})
    shares = [numbers(make_meta_dataset(path, shard_data=True, rank=r, world_size=3)) for r in range(3)]
    assert shares == [[0, 3, 2], [1, 0], [2, 1]]  # a: 0 1 2 3, then b: 0 1 2


def test_names_and_order(tmp_path: Path):
    for name, num in (("a.jsonl", 1), ("b.jsonl", 2), ("c.jsonl", 3)):
        write(tmp_path, name, num)
    path = meta(tmp_path, c={"file_name": "c.jsonl"}, a={"file_name": "a.jsonl"}, b={"file_name": "b.jsonl"})
    assert numbers(make_meta_dataset(path)) == [0, 0, 1, 0, 1, 2]
    assert numbers(make_meta_dataset(path, ["c", "a"])) == [0, 0, 1, 2]
    with pytest.raises(SourceError, match="not found in meta file"):
        make_meta_dataset(path, ["d"])


def test_the_process_group_is_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write(tmp_path, "a.jsonl")
    path = meta(tmp_path, a={"file_name": "a.jsonl"})
    assert len(make_meta_dataset(path, shard_data=True)) == 10
    assert "there is no process group to ask: every process loads everything" in caplog.text
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        caplog.clear()
        assert len(make_meta_dataset(path, shard_data=True)) == 10
        assert "no process group" not in caplog.text
        assert numbers(make_meta_dataset(path, shard_data=True, world_size=2)) == [0, 2, 4, 6, 8]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_does_not_exist(tmp_path: Path, rank: int, world_size: int):
    write(tmp_path, "a.jsonl")
    with pytest.raises(ConfigError, match=rf"rank {rank} of world size {world_size} does not exist"):
        make_meta_dataset(meta(tmp_path, a={"file_name": "a.jsonl"}), shard_data=True, rank=rank, world_size=world_size)


def test_bad_records_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write(tmp_path, "a.jsonl", 3)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"broken\n{"messages": [{"role": "user", "content": "Q3"}, {"role": "x", "content": ""}]}\n')
    path = meta(tmp_path, a={"file_name": "a.jsonl"})
    dropped = make_meta_dataset(path)
    assert numbers(dropped) == [0, 1, 2]
    assert dropped.ledger.by_reason() == {"convert: broken_json": 1, "convert: unmapped_role": 1}
    assert dropped.ledger.num_seen == 5
    assert [bad.sample.rpartition("/")[2] for bad in dropped.ledger.newest] == ["a.jsonl:4", "a.jsonl:5"]
    assert "dataset 'a': 2 samples are bad and left out" in caplog.text
    assert "a.jsonl:4: broken JSON" in caplog.text
    kept = make_meta_dataset(path, on_mismatch="keep")
    assert numbers(kept) == [0, 1, 2, 3]
    assert "1 samples are kept without what does not map (unmapped_role 1)" in caplog.text
    with pytest.raises(SourceError, match=r"a\.jsonl:4: broken JSON"):
        make_meta_dataset(path, on_mismatch="raise")


def test_stats_and_summary(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write(tmp_path, "a.jsonl", 2, _text_tokens=5)
    image = {"messages": [{"role": "user", "content": "<image>" + "x" * 11}], "images": ["1.jpg"]}
    (tmp_path / "b.json").write_text(
        json.dumps([image, {**image, "mm_inputs_meta": {"images_meta": [{"n_tokens": 7}]}}])
    )
    path = meta(tmp_path, a={"file_name": "a.jsonl"}, b={"file_name": "b.json"})
    with caplog.at_level(logging.INFO):
        examples = make_meta_dataset(path, unknown_option=1)
    assert isinstance(examples, list)
    assert examples.stats == {
        "n_images": 2, "n_videos": 0, "n_text_only": 2, "n_text_tokens": 16, "n_media_tokens": 507,
    }  # fmt: skip
    assert "4 samples of all ranks in" in caplog.text
    assert "dataset 'a': 2 samples (0 images, 0 videos, 2 text_only), 0 bad; located in" in caplog.text
    assert "dataset 'b': 2 samples (2 images, 0 videos, 0 text_only), 0 bad; located in" in caplog.text
    assert "dataset 'b': 2 of 2 samples have no _text_tokens" in caplog.text
    assert "dataset 'b': 1 of 2 samples have media without mm_inputs_meta" in caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not any("dataset 'a':" in message for message in warnings)
    assert "make_meta_dataset has no use for unknown_option" in caplog.text


def _conversation(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(items)}, {"role": "assistant", "content": "abcd"}]


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (
            {"conversation": _conversation({"type": "text", "text": "x" * 7})},
            {"n_text_tokens": 3, "n_text_only": 1, "n_missing_text_tokens": 1},
        ),
        (
            {
                "conversation": _conversation({"type": "image", "image": "a"}, {"type": "video", "video": "b"}),
                "_text_tokens": 9,
            },
            {"n_images": 1, "n_videos": 1, "n_text_tokens": 9, "n_media_tokens": 1000, "n_missing_mm_inputs_meta": 1},
        ),
        (
            {"conversation": _conversation({"type": "audio", "audio": "a"}), "_text_tokens": 0},
            {"n_media_tokens": 500, "n_missing_mm_inputs_meta": 1},
        ),
        (
            {
                "conversation": _conversation({"type": "image", "image": "a"}),
                "_text_tokens": None,
                "mm_inputs_meta": {"images_meta": [None, {"n_tokens": 3}, {}, [2, 2]], "videos_meta": [[1]]},
            },
            {"n_images": 1, "n_text_tokens": 1, "n_missing_text_tokens": 1, "n_media_tokens": 3 + 500 * 3},
        ),
    ],
)
def test_collect_sample_stats(example: dict[str, Any], expected: dict[str, int]):
    keys = (
        "n_images", "n_videos", "n_text_only", "n_text_tokens", "n_media_tokens", "n_missing_text_tokens",
        "n_missing_mm_inputs_meta",
    )  # fmt: skip
    assert collect_sample_stats([example]) == {**dict.fromkeys(keys, 0), **expected}


def test_passengers_of_odd_types_count_as_missing():
    odd = {"conversation": _conversation({"type": "image", "image": "a"}), "_text_tokens": "9", "mm_inputs_meta": [1]}
    stats = collect_sample_stats([odd])
    assert stats["n_missing_text_tokens"] == stats["n_missing_mm_inputs_meta"] == 1


def test_config(tmp_path: Path):
    write(tmp_path, "a.jsonl")
    config = MetaDatasetConfig(path_or_dataset=meta(tmp_path, a={"file_name": "a.jsonl"}), shard_data=True)
    assert MetaDatasetConfig.builds_with_data_parallel_rank
    assert numbers(config.build(rank=1, world_size=5)) == [1, 6]
    with pytest.raises(ConfigError, match="path_or_dataset is empty, so there is no data"):
        MetaDatasetConfig()
    with pytest.raises(ConfigError, match="did you mean 'drop'"):
        MetaDatasetConfig(path_or_dataset="x", on_mismatch="dropp")  # type: ignore[arg-type]


def test_loading_whole_files(tmp_path: Path):
    write(tmp_path, "a.jsonl", 5)
    write(tmp_path, "a.json", 5)
    assert load_json_or_jsonl(str(tmp_path / "a.jsonl")) == load_json_or_jsonl(str(tmp_path / "a.json"))
    examples, total = load_jsonl_for_rank(str(tmp_path / "a.jsonl"), 1.0, 1, 2)
    assert ([e["messages"][0]["content"] for e in examples], total) == (["Q1", "Q3"], 5)
    examples, total = load_jsonl_for_rank(str(tmp_path / "a.jsonl"), 2.0, None, None)
    assert (len(examples), total) == (10, 5)
    (tmp_path / "b.json").write_text('{"a": 1}')
    with pytest.raises(SourceError, match="Expected a JSON array"):
        load_json_or_jsonl(str(tmp_path / "b.json"))
    (tmp_path / "c.jsonl").write_text("{}\n{")
    with pytest.raises(BadSampleError, match=r"c\.jsonl:2: broken JSON .* cannot be loaded whole"):
        load_json_or_jsonl(str(tmp_path / "c.jsonl"))
