"""Every command of docs/formats.md runs on data as the page describes it, and every line in its table is printed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlm_stream.cli import main
from vlm_stream.sources import recognise
from vlm_stream.testing import build_processor, make_jpeg

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^vlm-stream (.+)$", PAGE, re.MULTILINE)
TABLE = re.findall(r"^\| .+? \| `(\{.+?\})`.* \| `([^`]+)` \|$", PAGE, re.MULTILINE)


def turns(text: str, roles: tuple[str, str, str, str] = ("from", "value", "human", "gpt")) -> list[dict[str, str]]:
    role, content, user, assistant = roles
    return [{role: user, content: text}, {role: assistant, content: "A cat."}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("images", "data", "set/data"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "images" / "1.jpg").write_bytes(make_jpeg(56, 84))
    build_processor("qwen2_5_vl").save_pretrained(tmp_path / "processor")
    files = {
        "llava.json": [{"image": "1.jpg", "conversations": turns("<image>\nWhat?")}],
        "unplaced.json": [{"image": "1.jpg", "conversations": turns("What?")}],
        "dialogs.jsonl": {"photos": ["1.jpg"], "dialog": turns("<image>What?", ("who", "says", "me", "you"))},
        "pairs.jsonl": {"ask": "What?", "reply": "A cat."},
        "meta.json": {"llava": {"file_name": "llava.json", "media_dir": "images"}},
    }
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value) + "\n")
    rows = pa.Table.from_pylist(
        [{"image": {"bytes": make_jpeg(20, 30), "path": None}, "conversations": turns("<image>")}]
    )
    pq.write_table(rows, tmp_path / "data" / "train-00000-of-00001.parquet")
    for split in ("train", "test"):
        pq.write_table(rows, tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    return tmp_path


def test_every_command_runs(folder: Path) -> None:
    assert len(COMMANDS) == 8
    for command in COMMANDS:
        words = shlex.split(command)
        assert main([*words, *(["--workers", "1"] if words[0] == "make-shards" else [])]) == 0, command
    for number in range(1, 8):
        totals = json.loads((folder / f"out-{number}" / "dataset.json").read_text())["totals"]
        assert (totals["samples"], totals["images"]) == (1, 0 if number == 5 else 1)
    assert json.loads((folder / "counted.json").read_text())[0]["_media_tokens"] > 0


@pytest.mark.parametrize(("record", "line"), TABLE)
def test_every_line_of_the_table(record: str, line: str) -> None:
    record = record.replace("\\n", "\\\\n") if "\n" in record else record
    whole = record.replace('"conversations": [...]', f'"conversations": {json.dumps(turns("What?"))}')
    whole = whole.replace('"images": [...]', '"images": ["1.jpg"]').replace(", ...]", "]")
    found = recognise([json.loads(whole)])
    assert found is not None
    assert found.line == line


def test_the_table_is_read() -> None:
    assert len(TABLE) == 9
