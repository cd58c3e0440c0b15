"""The factories on small local datasets of the same schema: lazy, keyed, and readable as records with stored bytes."""

from __future__ import annotations

import io
import json
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pytest
import soundfile
from PIL import Image, UnidentifiedImageError

import vlm_stream.sources
from vlm_stream.errors import BadSampleError, MissingExtraError, SourceError
from vlm_stream.media import resample_audio
from vlm_stream.sources import (
    FACTORIES,
    HFSource,
    json2token,
    make_cord_v2_dataset,
    make_cv17_dataset,
    make_llava_onevision_dataset,
    make_medpix_dataset,
    make_rdr_dataset,
    make_sharegpt_dataset,
    make_shopify_product_catalogue_dataset,
    make_tulu3_dataset,
    make_tulu3_magicoder_text_mix_dataset,
    make_unimm_chat_dataset,
    open_factory,
    open_source,
)
from vlm_stream.sources.hf_source import resample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


EDGE = 400
"""Samples at either end of a resampled clip, which the silence around it reaches."""


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8 + number, 6), (number, 0, 0)).save(out, format="JPEG")
    return out.getvalue()


def image_rows(column: str, **columns: list[Any]) -> datasets.Dataset:
    num = max(map(len, columns.values()))
    images = [{"bytes": jpeg(i), "path": None} for i in range(num)]
    return datasets.Dataset.from_dict({column: images, **columns}).cast_column(column, datasets.Image())


def texts(example: dict[str, Any]) -> list[list[str]]:
    return [[i["text"] for i in m["content"] if i["type"] == "text"] for m in example["conversation"]]


def wav(rate: int = 8000, channels: int = 2) -> bytes:
    out = io.BytesIO()
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)
    soundfile.write(out, np.stack([tone] * channels, axis=1), rate, format="WAV")
    return out.getvalue()


SIMPLE = [
    (make_rdr_dataset, "image", {"text": ["a", "b", "c"]}, "Describe this image.", "b"),
    (make_medpix_dataset, "image_id", {"question": ["p", "q", "r"], "answer": ["a", "b", "c"]}, "q", "b"),
    (
        make_shopify_product_catalogue_dataset,
        "product_image",
        {"ground_truth_category": ["a", "b", "c"]},
        "What product category does this item belong to?",
        "b",
    ),
]


@pytest.mark.parametrize(("make", "column", "columns", "question", "answer"), SIMPLE)
def test_image_and_text(
    make: Callable[..., HFSource],
    column: str,
    columns: dict[str, list[str]],
    question: str,
    answer: str,
    tmp_path: Path,
):
    rows = image_rows(column, **columns)
    source = make(rows)
    assert len(source) == 3
    example = source[1]
    assert [m["role"] for m in example["conversation"]] == ["user", "assistant"]
    assert texts(example) == [[question], [answer]]
    picture = example["conversation"][0]["content"][0]["image"]
    assert isinstance(picture, Image.Image)
    assert picture.size == (9, 6)
    # as a source of records: the stored bytes, bit for bit, in this and in another process
    record = pickle.loads(pickle.dumps(source)).read(1)
    assert record.conversation[0]["content"][0] == {"type": "image", "image": jpeg(1)}
    assert (record.source, record.id, record.origin) == (source.name, "1", f"{source.name}:1")
    # from a folder, with a limit that is larger than the dataset, and with one that is not
    rows.save_to_disk(str(tmp_path / "saved"))
    assert len(make(str(tmp_path / "saved"), limit_dataset_samples=99)) == 3
    assert [texts(e)[1] for e in make(str(tmp_path / "saved"), limit_dataset_samples=2)] == [["a"], ["b"]]
    assert [texts(e)[1] for e in make(datasets.DatasetDict({"test": rows}), split="test")[-2:]] == [["b"], ["c"]]
    with pytest.raises(SourceError, match=rf"has no column '{column}'.* Allowed: "):
        make(rows.remove_columns(column))


def test_a_parquet_folder_as_on_the_hub(tmp_path: Path):
    image_rows("image", text=["a", "b", "c"]).to_parquet(str(tmp_path / "train-00000.parquet"))
    assert [texts(e)[1] for e in make_rdr_dataset(str(tmp_path), limit_dataset_samples=1)] == [["a"]]


def test_nothing_is_decoded_before_it_is_asked_for():
    rows = datasets.Dataset.from_dict({"image": [{"bytes": b"no image", "path": None}], "text": ["a"]})
    source = make_rdr_dataset(rows.cast_column("image", datasets.Image()))
    assert source.read(0).conversation[0]["content"][0]["image"] == b"no image"
    with pytest.raises(
        BadSampleError, match=r"rdr:0: a medium cannot be decoded \(.*\)\. The sample is left out"
    ) as caught:
        source[0]
    assert caught.value.reason == "unreadable_media"


def test_rows_with_decoded_images_become_png():
    picture = Image.new("RGB", (5, 4), (1, 2, 3))
    source = make_rdr_dataset([{"image": picture, "text": "t"}])
    assert source[0]["conversation"][0]["content"][0]["image"] is picture
    stored = source.read(0).conversation[0]["content"][0]["image"]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored))), np.asarray(picture))


def test_bad_rows_are_named():
    rows = [{"image": None, "text": "t"}, {"image": jpeg(0), "text": None}, {"image": jpeg(0)}]
    source = make_rdr_dataset(rows)
    with pytest.raises(BadSampleError, match=r"rdr:0: the image column is empty\. The sample is left out") as caught:
        source.read(0)
    assert (caught.value.stage, caught.value.reason) == ("convert", "null_media")
    with pytest.raises(BadSampleError, match=r"rdr:1: a text column holds None, not text"):
        source[1]
    with pytest.raises(BadSampleError, match=r"rdr:2: the row has no column 'text'"):
        source.read(2)
    with pytest.raises(IndexError, match="row 3 of source 'rdr', which has 3"):
        source.read(3)


def test_cord_v2_chooses_by_row():
    parses = [{"gt_parses": [{"n": str(i)} for i in range(50)]} for _ in range(3)]
    rows = image_rows("image", ground_truth=[json.dumps(p) for p in parses])
    source = make_cord_v2_dataset(rows)
    random.seed(1)
    answers = [texts(source[i])[1][0] for i in (2, 0, 1)]
    random.seed(2)
    again = [texts(example)[1][0] for example in make_cord_v2_dataset(rows)]
    assert again == [
        answers[1],
        answers[2],
        answers[0],
    ]  # neither the order of reading nor the global generator matters
    assert len(set(again)) > 1
    assert [texts(e)[1][0] for e in make_cord_v2_dataset(rows, seed=7)] != again
    assert texts(source[0])[0] == ["Describe this image."]


def test_cord_v2_layouts():
    truths = [json.dumps({"gt_parse": {"total": {"price": "3"}}}), json.dumps({"gt_parses": []}), "{", None, "[1]"]
    source = make_cord_v2_dataset(image_rows("image", ground_truth=truths), limit_dataset_samples=10)
    assert texts(source[0])[1] == ["<s_total><s_price>3</s_price></s_total>"]
    with pytest.raises(BadSampleError, match=r"cord_v2:1: 'ground_truth' has no parse \(keys: gt_parses\)"):
        source[1]
    with pytest.raises(BadSampleError, match=r"cord_v2:2: Expecting property name") as caught:
        source.read(2)
    assert caught.value.reason == "bad_row"
    for index in (3, 4):
        with pytest.raises(BadSampleError, match=rf"cord_v2:{index}: 'ground_truth' is not a JSON object"):
            source.read(index)


def test_json2token():
    assert json2token({"b": 2, "a": [{"x": 1}, {"y": "z"}]}) == "<s_b>2</s_b><s_a><s_x>1</s_x><sep/><s_y>z</s_y></s_a>"
    assert json2token({"a": 1, "b": 2}, sort_json_key=False) == "<s_a>1</s_a><s_b>2</s_b>"
    assert json2token({"text_sequence": "as it is"}) == "as it is"


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": value} for role, value in pairs]


def test_unimm_chat():
    dialogues = [
        turns(("human", " a <image> b<IMAGE  >"), ("gpt", " c "), ("human", " "), ("system", "s"), ("gpt", "d")),
        turns(("system", "only")),
        turns(("human", "unseen"), ("gpt", "x")),
        [*turns(("human", "x")), {"from": "gpt", "value": None}],  # type: ignore[dict-item]
    ]
    source = make_unimm_chat_dataset(image_rows("image", conversation=[json.dumps(d) for d in dialogues]))
    example = source[0]
    kinds = [[i.get("text", i["type"]) for i in m["content"]] for m in example["conversation"]]
    assert kinds == [["a", "image", "b", "image"], ["c"], ["image"], ["d"]]
    shown = [i["image"] for m in example["conversation"] for i in m["content"] if i["type"] == "image"]
    assert shown[0] is shown[1] is shown[2]
    assert source.read(0).extras["_mismatches"] == [
        "unmapped_role: turn 4 has the role 'system'; mapped are gpt, human"
    ]
    with pytest.raises(BadSampleError, match=r"unimm_chat:1: no turn maps: unmapped_role: turn 1"):
        source[1]
    with pytest.raises(BadSampleError, match=r"unimm_chat:3: turn 2 has no text under 'value'"):
        source[3]
    assert source.read(2).extras["_mismatches"] == ["surplus_media: the row has an image, but no turn shows <image>"]


def test_llava_onevision():
    rows = [
        {"image": {"bytes": jpeg(0), "path": None}, "conversations": turns(("human", "a\n<image>"), ("gpt", "b"))},
        {"image": None, "conversations": turns(("human", "text"), ("gpt", "b"))},
        {"image": None, "conversations": turns(("human", "<image>"), ("gpt", "b"))},
        {"image": jpeg(1), "conversations": turns(("human", "unseen"), ("gpt", "b"))},
        {"image": None, "conversations": []},
    ]
    source = make_llava_onevision_dataset(rows)
    first = source[0]
    assert [i["type"] for i in first["conversation"][0]["content"]] == ["image", "text"]
    assert texts(first) == [["a"], ["b"]]
    assert first["image"] is first["conversation"][0]["content"][0]["image"]
    assert source[1]["image"] is None
    with pytest.raises(BadSampleError, match=r"llava_onevision:2: the image column is empty"):
        source[2]
    assert source.read(3).extras["_mismatches"] == ["surplus_media: the row has an image, but no turn shows <image>"]
    with pytest.raises(
        BadSampleError, match=r"llava_onevision:4: the conversation is not a list of turns, or is empty"
    ):
        source.read(4)


def test_cv17():
    rows = datasets.Dataset.from_dict(
        {
            "audio": [{"bytes": wav(), "path": None}, {"bytes": b"noise", "path": None}],
            "transcription": ["merhaba", "x"],
        }
    ).cast_column("audio", datasets.Audio(decode=False))
    source = make_cv17_dataset(rows)
    example = source[0]
    assert [m["content"] for m in example["conversation"]] == [
        "<|endoftext11|>Transcribe the Turkish audio clip.",
        "merhaba",
    ]
    samples, rate = example["audio"]
    assert (samples.shape, samples.dtype, rate) == ((16000,), np.float32, 16000)
    tone = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert np.abs(samples - tone)[EDGE:-EDGE].max() < 1e-3
    record = source.read(0)
    assert record.conversation[0]["content"] == [
        {"type": "audio", "audio": wav()},
        {"type": "text", "text": "Transcribe the Turkish audio clip."},
    ]
    with pytest.raises(BadSampleError, match=r"cv17:1: a medium cannot be decoded"):
        source[1]


@pytest.mark.parametrize(("rate", "new_rate"), [(48000, 16000), (44100, 16000), (8000, 16000), (16000, 16000)])
def test_resampling_keeps_tones_and_is_that_of_decoding(rate: int, new_rate: int):
    def tone(at: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.sin(2 * np.pi * 300 * np.arange(at) / at).astype(np.float32)

    found = resample(tone(rate), rate, new_rate)
    assert np.abs(found - tone(new_rate))[EDGE:-EDGE].max() < 1e-3
    assert np.array_equal(found, resample_audio(tone(rate), rate, new_rate))


def messages(*contents: str) -> list[dict[str, str]]:
    return [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 50, contents, strict=False)]


def test_tulu3(caplog: pytest.LogCaptureFixture):
    rows = datasets.Dataset.from_dict({"messages": [messages("a", "b"), messages(*"abcdef"), messages("c", "d"), []]})
    source = make_tulu3_dataset(rows)
    assert texts(source[0]) == [["a"], ["b"]]
    assert source.read(2).conversation == source[2]["conversation"]
    with pytest.raises(BadSampleError, match=r"tulu3:3: 'messages' has no turns\. The sample is left out; mend it\.$"):
        source.read(3)
    short = make_tulu3_dataset(rows, max_turns=4, limit_dataset_samples=2)
    assert [texts(example)[0][0] for example in short] == ["a", "c"]
    assert "tulu3: 1 of 4 dialogues have more than 4 turns and are left out" in caplog.text
    assert len(make_tulu3_dataset(list(rows), max_turns=4)) == 3


def test_tulu3_magicoder_mix():
    tulu = datasets.Dataset.from_dict({"messages": [messages(f"t{i}", "x") for i in range(20)] + [messages(*"a" * 18)]})
    code = datasets.Dataset.from_dict({"problem": [f"p{i}" for i in range(6)], "solution": ["s"] * 6})
    source = make_tulu3_magicoder_text_mix_dataset(tulu, code)
    asked = [texts(example)[0][0] for example in source]
    assert {f"t{i}" for i in range(20)} | {f"p{i}" for i in range(6)} == set(asked)  # until both were seen whole
    mixed = datasets.interleave_datasets(
        [
            datasets.Dataset.from_dict({"q": [f"t{i}" for i in range(20)]}),
            datasets.Dataset.from_dict({"q": code["problem"]}),
        ],
        probabilities=[0.8, 0.2],
        seed=42,
        stopping_strategy="all_exhausted",
    )
    assert asked == list(mixed["q"])
    limited = make_tulu3_magicoder_text_mix_dataset(tulu, code, limit_total=5)
    assert [texts(e)[0][0] for e in limited] == asked[:5]
    assert [limited.read(i).source for i in range(5)] == [
        "magicoder" if q.startswith("p") else "tulu3" for q in asked[:5]
    ]
    assert [texts(e)[0][0] for e in pickle.loads(pickle.dumps(limited))[1:3]] == asked[1:3]
    with pytest.raises(IndexError, match="record 5 of source 'tulu3_magicoder', which has 5"):
        limited.read(5)
    with pytest.raises(SourceError, match=r"'tulu3' has no rows \(left\), so there is nothing to mix"):
        make_tulu3_magicoder_text_mix_dataset(tulu, code, max_turns=1)
    with pytest.raises(SourceError, match=r"probabilities \(0.5, 0.6\) are no mixture of two"):
        make_tulu3_magicoder_text_mix_dataset(tulu, code, probabilities=(0.5, 0.6))


def test_any_sharegpt_dataset():
    images = [[{"bytes": jpeg(0), "path": None}, {"bytes": jpeg(1), "path": None}], []]
    images = [*images, [{"bytes": jpeg(0), "path": None}]]
    dialogues = [turns(("human", text), ("gpt", "b")) for text in ("<image>a<image>", "<image>", "<image><image>")]
    rows = datasets.Dataset.from_dict({"conversations": dialogues, "images": images})
    rows = rows.cast_column("images", datasets.List(datasets.Image()))
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    source = make_sharegpt_dataset(rows, columns={"messages": "conversations"}, tags=tags)
    stored = [item["image"] for item in source.read(0).conversation[0]["content"] if item["type"] == "image"]
    assert stored == [jpeg(0), jpeg(1)]
    assert source[0]["conversation"][0]["content"][2]["image"].size == (9, 6)
    with pytest.raises(
        BadSampleError, match=r"sharegpt:2: turn 1 \(user\) shows <image> number 2, but 'images' has 1\."
    ):
        source.read(2)
    assert texts(source[1])[0] == ["<image>"]  # without images it is text
    recognised = make_sharegpt_dataset(rows)
    assert recognised.line == "ShareGPT conversations, images in 'images'"
    assert recognised.read(0).conversation == source.read(0).conversation
    kept = make_sharegpt_dataset(rows, columns={"messages": "conversations"}, tags=tags, on_mismatch="keep")
    assert kept.read(2).extras["_mismatches"][0].startswith("surplus_placeholder: ")


def test_factories_by_name(tmp_path: Path):
    image_rows("image", text=["a", "b"]).save_to_disk(str(tmp_path / "rdr"))
    source = open_source(f"factory:rdr={tmp_path}/rdr")
    assert source.counts == {"rdr": 2}
    assert source.read(1).conversation[0]["content"][0]["image"] == jpeg(1)
    datasets.Dataset.from_dict({"m": [messages("a", "b")]}).save_to_disk(str(tmp_path / "chat"))
    chat = open_source(f"factory:sharegpt={tmp_path}/chat", columns={"messages": "m"}, on_mismatch="raise")
    assert texts({"conversation": chat.read(0).conversation}) == [["a"], ["b"]]
    with pytest.raises(SourceError, match=r"no dataset factory 'medpics' .*did you mean 'medpix'"):
        open_source("factory:medpics")
    with pytest.raises(SourceError, match=r"factory:sharegpt names no dataset; write factory:sharegpt=PATH_OR_HUB_ID"):
        open_factory("factory:sharegpt")
    with pytest.raises(
        SourceError, match=r"the factory knows its columns; leave names, columns, tags and media_dir out"
    ):
        open_source("factory:rdr", media_dir="x")
    with pytest.raises(SourceError, match=r"the dataset has one part and its own media; leave names and media_dir out"):
        open_source("factory:sharegpt=x", names=["a"])
    public = {name for name in dir(vlm_stream.sources) if name.startswith("make_") and name.endswith("_dataset")}
    assert {make.__name__ for make in FACTORIES.values()} == public - {"make_meta_dataset"}


def test_datasets_that_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    rows = image_rows("image", text=["a", "b", "c"])
    with pytest.raises(SourceError, match=r"no split 'tarin'.*did you mean 'train'"):
        make_rdr_dataset(datasets.DatasetDict({"train": rows}), split="tarin")
    with pytest.raises(SourceError, match=r"a IterableDataset gives its rows in one order only.* without streaming"):
        make_rdr_dataset(rows.to_iterable_dataset())
    with pytest.raises(SourceError, match=r"a limit of -1 rows cannot be kept"):
        make_rdr_dataset(rows, limit_dataset_samples=-1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"empty' \(split 'train'\) cannot be loaded"):
        make_rdr_dataset(str(tmp_path / "empty"))
    make_rdr_dataset(rows, shuffle_buffer=3)
    assert "no dataset factory has a use for shuffle_buffer" in caplog.text
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"Reading HF datasets needs the package 'datasets'.*vlm-stream\[hf\]"):
        make_rdr_dataset("quintend/rdr-items")


def test_audio_without_its_package(monkeypatch: pytest.MonkeyPatch):
    source = make_cv17_dataset([{"audio": wav(), "transcription": "x"}])
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert source.read(0).conversation[0]["content"][0]["audio"] == wav()
    with pytest.raises(MissingExtraError, match=r"Decoding audio needs the package 'soundfile'.*vlm-stream\[audio\]"):
        source[0]


def test_images_of_rows_have_a_closed_list_of_formats():
    from vlm_stream.sources.hf_source import decode_images

    def row(kind: str) -> dict:
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8)).save(buffer, kind)
        return {"conversation": [{"role": "user", "content": [{"type": "image", "image": buffer.getvalue()}]}]}

    assert decode_images(row("PNG"))["conversation"][0]["content"][0]["image"].size == (8, 8)
    with pytest.raises(UnidentifiedImageError):
        decode_images(row("EPS"))
