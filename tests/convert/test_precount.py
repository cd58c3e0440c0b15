"""Counts written back into data files, by one process or several."""

from __future__ import annotations

import gzip
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlm_stream.cli import main
from vlm_stream.conversation import iter_media
from vlm_stream.convert import precount
from vlm_stream.errors import SourceError
from vlm_stream.sources import make_meta_dataset, open_source
from vlm_stream.testing import build_processor, make_jpeg

if TYPE_CHECKING:
    from pathlib import Path


module = sys.modules[precount.__module__]


@pytest.fixture
def media(tmp_path: Path) -> str:
    (tmp_path / "media").mkdir()
    for i in range(4):
        (tmp_path / "media" / f"{i}.jpg").write_bytes(make_jpeg(20, 30 + i))
    return str(tmp_path / "media")


def llava(i: int) -> dict[str, Any]:
    """A record of LLaVA; every other one has an image."""
    turns = [{"from": "human", "value": "<image>\nWhat?" if i % 2 else "Why?"}, {"from": "gpt", "value": f"It is {i}."}]
    return {"id": i, "conversations": turns} | ({"image": [f"{i}.jpg"]} if i % 2 else {})


@given(st.permutations(range(0, 40, 5)))
def test_chunks_in_any_order_are_written_in_the_order_of_the_file(begins: list[int]) -> None:
    counts = {begin: [f"{number}" for number in range(begin, begin + 5)] for begin in begins}
    found = ((range(begin, begin + 5), counts[begin]) for begin in begins)
    assert list(module._in_order(found)) == [f"{number}" for number in range(40)]


def test_precount(
    media: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 2)
    processor = build_processor("qwen2_5_vl")
    processor.save_pretrained(tmp_path / "processor")
    values = [llava(i) for i in range(4)]
    text = "\n".join([*map(json.dumps, values), "{broken"]) + "\n"
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    flags = ["--processor", str(tmp_path / "processor"), "--media-dir", media]
    out = tmp_path / "counted.jsonl"
    assert main(["precount", str(tmp_path / "data.jsonl.gz"), *flags, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "data: LLaVA conversations, images in 'image'\n" in shown.err
    assert "data.jsonl.gz:5" in shown.err
    assert "broken_json" in shown.err
    lines = out.read_text().splitlines()
    assert lines[4] == "{broken"
    counted = [json.loads(line) for line in lines[:4]]
    for value, before in zip(counted, values, strict=True):
        counts = value.pop("_text_tokens"), value.pop("_media_tokens")
        assert value == before
        conversation = open_source(str(out), media_dir=media).read(values.index(before)).conversation
        written = processor.apply_chat_template([conversation], tokenize=False)
        images = [Image.open(item["image"]) for item in iter_media(conversation)]
        real = processor(text=written, images=images or None)["input_ids"][0]
        assert sum(counts) == len(real)
        assert (counts[1] > 0) == ("image" in before)
    packed = (tmp_path / "data.jsonl.gz").read_bytes()
    again = ["precount", str(tmp_path / "data.jsonl.gz"), *flags, "--out", str(tmp_path / "." / "data.jsonl.gz")]
    assert main(again) == 2
    assert "is the input itself" in capsys.readouterr().err
    assert (tmp_path / "data.jsonl.gz").read_bytes() == packed
    flags += ["--workers", "2"]
    assert main(["precount", str(tmp_path / "data.jsonl.gz"), *flags, "--in-place"]) == 0
    assert gzip.decompress((tmp_path / "data.jsonl.gz").read_bytes()) == out.read_bytes()
    examples = make_meta_dataset(str(out))
    assert examples.stats["n_text_tokens"] + examples.stats["n_media_tokens"] == sum(
        json.loads(line)["_text_tokens"] + json.loads(line)["_media_tokens"] for line in lines[:4]
    )
    (tmp_path / "array.json").write_text(json.dumps(values))
    report = precount(tmp_path / "array.json", processor=str(tmp_path / "processor"), media_dir=media)
    assert (report.num_records, report.bad) == (4, {})
    assert [v["_text_tokens"] for v in json.loads((tmp_path / "array.json").read_text())] == [
        json.loads(line)["_text_tokens"] for line in lines[:4]
    ]


@pytest.mark.parametrize("ratio", [0.67, 1, 2])
def test_what_names_data_files_is_no_data_file(ratio: float, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(llava(0)) for _ in range(3)) + "\n")
    meta = {"chat": {"file_name": "data.jsonl", "sample_ratio": ratio}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("meta.json", "data*.jsonl"):
        for out in (None, tmp_path / "counted.jsonl"):
            with pytest.raises(
                SourceError, match=r"is not one JSON file.*nothing was written.*data\.jsonl\) one by one"
            ):
                precount(tmp_path / name, out, processor="none")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_media_that_nothing_shows_are_counted_where_they_go_first(
    media: str, saved_processor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"image": "1.jpg", "conversations": llava(0)["conversations"]}
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    command = ["precount", str(tmp_path / "data.jsonl"), "--processor", str(saved_processor), "--media-dir", media]
    command += ["--out", str(tmp_path / "out.jsonl"), "--json"]
    assert main(command) == 1
    assert "surplus_media" in str(json.loads(capsys.readouterr().out)["bad"])
    assert main([*command, "--media-first"]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["_media_tokens"] > 0


def test_a_file_without_records_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text("[]")
    with pytest.raises(SourceError, match=r"data\.json has no records, so there is nothing to count and nothing was"):
        precount(path, processor="none")
    assert path.read_text() == "[]"
