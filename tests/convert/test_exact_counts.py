"""With a processor the counts in the index are the lengths of its own input_ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vlm_stream.convert import dataset_stats, make_shards, recount, verify_dataset
from vlm_stream.convert.counting import ExactCounter
from vlm_stream.encode import EncodeConfig, Encoder
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.format import load_manifest, read_index
from vlm_stream.storage import open_store
from vlm_stream.testing import build_processor
from vlm_stream.tokens import Geometry, ImageSize, MediaSizes, count_tokens, make_columns


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, str]:
    processor = build_processor("qwen2_5_vl")
    folder = tmp_path_factory.mktemp("qwen")
    processor.save_pretrained(folder)
    return processor, str(folder)


@pytest.fixture(scope="module")
def counted(toy_meta: Path, qwen: tuple[object, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("counted") / "out"
    report = make_shards(toy_meta, out, samples_per_shard=100, processor=qwen[1])
    assert report.tokens == "exact"
    return out


def test_manifest_says_who_counted(counted: Path, toy_shards: Path, qwen: tuple[object, str]) -> None:
    tokens = load_manifest(open_store(str(counted))).tokens
    assert (tokens.kind, tokens.processor, tokens.processor_class) == ("exact", qwen[1], "Qwen2_5_VLProcessor")
    assert len(tokens.template_sha256) == 64
    assert tokens.library.startswith("transformers ")
    assert load_manifest(open_store(str(toy_shards))).tokens.kind == "estimated"


def test_index_count_is_the_length_of_input_ids(counted: Path, qwen: tuple[object, str]) -> None:
    """Text and image samples of the first shard, encoded whole by the processor itself."""
    processor, _ = qwen
    store = open_store(str(counted))
    shard = load_manifest(store).shards[0]
    index = read_index(store, shard)
    lengths = count_tokens(index.media, Geometry.from_processor(processor)).tokens
    checked = 0
    for row in range(0, len(index), 9):
        if np.diff(index.media.video_splits)[row]:
            continue
        contents = {
            member.name: store.get_ranges(shard.name, [(member.offset, member.size)])[0]
            for member in index.members(row)
        }
        conversation = json.loads(bytes(contents["json"]))["conversation"]
        import io

        images = [
            Image.open(io.BytesIO(contents[item["image"]])).convert("RGB")
            for message in conversation
            for item in message["content"]
            if item["type"] == "image"
        ]
        text = processor.apply_chat_template(conversation, tokenize=False)
        encoded = processor(text=[text], images=images or None)
        assert len(encoded["input_ids"][0]) == lengths[row]
        checked += 1
    assert checked >= 8


def test_recount_changes_counts_and_no_tar(
    toy_shards: Path, counted: Path, qwen: tuple[object, str], tmp_path: Path, digests
) -> None:
    dataset = Path(shutil.copytree(toy_shards, tmp_path / "copy"))
    before = digests(dataset)
    report = recount(str(dataset), qwen[1])
    after = digests(dataset)
    assert {name for name in before if before[name] != after[name]} == {
        "dataset.json",
        *(path.name for path in dataset.glob("*.index.parquet")),
    }
    exact = load_manifest(open_store(str(counted)))
    manifest = load_manifest(open_store(str(dataset)))
    assert manifest.digest == report.digest
    assert manifest.tokens == exact.tokens
    assert report.tokens_after == exact.totals.text_tokens == manifest.totals.text_tokens
    assert report.tokens_before == load_manifest(open_store(str(toy_shards))).totals.text_tokens
    assert report.num_changed > 150
    assert report.refused == ()
    assert verify_dataset(str(dataset)).problems == ()
    back = recount(str(dataset), None)
    assert back.tokens_after == report.tokens_before
    assert digests(dataset) == before


def test_recount_keeps_and_names_what_a_processor_refuses(toy_shards: Path, tmp_path: Path) -> None:
    gemma = tmp_path / "gemma"
    build_processor("gemma3").save_pretrained(gemma)
    dataset = Path(shutil.copytree(toy_shards, tmp_path / "copy"))
    report = recount(str(dataset), str(gemma))
    videos = load_manifest(open_store(str(dataset))).totals.videos
    assert 0 < len(report.refused) <= videos
    assert {bad.reason for bad in report.refused} == {"unsupported_medium"}
    assert report.refused[0].shard.startswith("shard-")
    assert verify_dataset(str(dataset)).problems == ()


def test_counts_that_records_bring_along_are_used_without_a_processor(write_jsonl, tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "x" * 30}]
    path = write_jsonl(
        [
            {"messages": turn},
            {"messages": turn, "_text_tokens": 77},
            {"messages": turn, "_text_tokens": "7"},
            {"messages": turn, "_text_tokens": 8.0},
        ]
    )
    make_shards(path, tmp_path / "out")
    store = open_store(str(tmp_path / "out"))
    assert read_index(store, load_manifest(store).shards[0]).media.text_tokens.tolist() == [10, 77, 10, 8]


def test_processor_that_does_not_exist(toy_meta: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the processor '.*empty' cannot be loaded \(.*nothing can be counted"):
        make_shards(toy_meta, tmp_path / "out", processor=str(tmp_path / "empty"))


def test_resume_with_another_processor_is_refused(toy_meta: Path, counted: Path) -> None:
    with pytest.raises(ConfigError, match=r"of another conversion \(the class of the processor was"):
        make_shards(toy_meta, counted, samples_per_shard=100)


def test_stats_add_up(counted: Path, qwen: tuple[object, str]) -> None:
    geometry = Geometry.from_processor(qwen[0])
    stats = dataset_stats(str(counted), count_tokens=lambda columns: count_tokens(columns, geometry).tokens)
    by_name = {histogram.name: histogram for histogram in stats.histograms}
    assert by_name["text per sample"].total == stats.totals.text_tokens
    assert by_name["sample length"].total > stats.totals.text_tokens
    assert by_name["images per sample"].total == stats.totals.images == by_name["image width"].num_values
    assert by_name["video length"].total == stats.totals.video_frames
    for histogram in stats.histograms:
        assert sum(histogram.counts) == histogram.num_values
        assert list(histogram.edges) == sorted(set(histogram.edges))
        assert histogram.low <= histogram.median <= histogram.p95 <= histogram.high


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava_onevision", "gemma3", "internvl"])
def counter_and_encoder(request: pytest.FixtureRequest) -> tuple[ExactCounter, Encoder]:
    processor = build_processor(request.param)
    return ExactCounter("x", processor), Encoder(processor, EncodeConfig(allow_unlabelled=True))


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_typed_control_strings_count_what_the_encoder_gives(
    counter_and_encoder: tuple[ExactCounter, Encoder], data: st.DataObject
) -> None:
    """Every added token of the tokenizer, also those of media, between words, blanks and newlines."""
    counter, encoder = counter_and_encoder
    control = sorted(map(str, encoder.processor.tokenizer.added_tokens_decoder.values()))
    pieces = st.lists(st.sampled_from([*control, "word", " ", "\n", "<image>", "<|im_end|>", "x"]), max_size=24)
    question, answer = ("".join(data.draw(pieces)) for _ in range(2))
    has_image = data.draw(st.booleans())
    image = [{"type": "image", "image": Image.new("RGB", (60, 40))}] if has_image else []
    conversation = [
        {"role": "user", "content": [*image, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    sizes = MediaSizes(images=(ImageSize(height=40, width=60),) if has_image else ())
    try:
        length = len(encoder.encode(conversation, {})["input_ids"])
    except BadSampleError:
        return  # a hole, whatever was counted
    columns = make_columns([sizes], [counter.count(conversation, sizes).text_tokens])
    assert count_tokens(columns, Geometry.from_processor(encoder.processor)).tokens[0] == length


@pytest.mark.parametrize("text", ["<|im_end|>" * 20, "a literal <image> and <video>", "<|im_start|>assistant\nno"])
def test_a_typed_control_string_costs_what_its_letters_do(
    counter_and_encoder: tuple[ExactCounter, Encoder], text: str
) -> None:
    counter, encoder = counter_and_encoder
    conversation = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    length = len(encoder.encode(conversation, {})["input_ids"])
    assert counter.count(conversation, MediaSizes()).text_tokens == length
