"""The commands over shards: output for people, JSON for programs, exit codes for scripts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from vlm_stream.cli import main
from vlm_stream.commands.arguments import parse_bytes, parse_mapping
from vlm_stream.commands.output import Progress
from vlm_stream.convert import dataset_stats
from vlm_stream.errors import ConfigError
from vlm_stream.schema import human_bytes
from vlm_stream.testing import build_processor, make_toy_dataset


def run(command: str, arguments: list[str]) -> int:
    return main([command, *arguments])


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_dataset(tmp_path_factory.mktemp("toy"), num_samples=40)


@pytest.fixture(scope="module")
def dataset(meta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "out"
    assert run("make-shards", [str(meta), str(out), "--samples-per-shard", "16", "--workers", "1", "--quiet"]) == 0
    return out


def test_tool_runs_by_path_from_anywhere(meta: Path, tmp_path: Path) -> None:
    tool = Path(__file__).parents[2] / "tools" / "make_shards.py"
    command = [sys.executable, str(tool), str(meta), str(tmp_path / "out"), "--workers", "1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for word in ("records", "samples", "images", "videos", "text only", "text tokens (estimated)", "shards", "seconds"):
        assert word in result.stdout
    assert "make-shards: 1/1 shards, 40 samples, " in result.stderr

    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "holds this dataset already" in result.stderr
    result = subprocess.run([*command, "--no-resume"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("captions: chat messages, images in 'images'\n")
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "holds a finished dataset; nothing was written" in result.stderr
    assert "Traceback" not in result.stderr


def test_make_shards_as_json(meta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        str(meta),
        str(tmp_path / "out"),
        "--json",
        "--workers",
        "1",
        "--shuffle",
        "3",
        "--max-shard-bytes",
        "100k",
    ]
    assert run("make-shards", arguments) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report["totals"]["samples"] == 40
    assert report["num_shards"] > 2


def test_summary_names_what_was_dropped_and_nothing_usable_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    record = {"conversations": [{"from": "human", "value": "<image>?"}], "image": "none.jpg"}
    data.write_text(json.dumps(record) + "\n{broken\n")
    arguments = [str(data), str(tmp_path / "out"), "--workers", "1"]
    arguments += ["--columns", "messages=conversations,images=image"]
    arguments += ["--tags", "role_tag=from,content_tag=value,user_tag=human"]
    assert run("make-shards", [*arguments, "--bad-budget", "1"]) == 1
    told = capsys.readouterr().err
    assert "1 x missing_file" in told
    assert "1 x broken_json" in told
    good = {"conversations": [{"from": "human", "value": "?"}]}
    data.write_text(data.read_text() + json.dumps(good) + "\n")
    assert run("make-shards", [*arguments, "--bad-budget", "1", "--overwrite"]) == 0
    output = capsys.readouterr().out
    assert "convert: missing_file" in output
    assert "convert: broken_json" in output


def test_verify_exit_codes(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", [str(dataset), "--workers", "1"]) == 0
    assert "40 samples" in (output := capsys.readouterr().out)
    assert output.endswith(": no problems\n")
    copy = Path(shutil.copytree(dataset, tmp_path / "copy"))
    data = bytearray((copy / "shard-000001.tar").read_bytes())
    data[600] ^= 1
    (copy / "shard-000001.tar").write_bytes(bytes(data))
    assert run("verify", [str(copy), "--workers", "1", "--quiet"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("shard-000001.tar 000000016 at byte 0: crc_mismatch: ")
    assert last.endswith(": 1 problems")
    assert run("verify", [str(copy), "--workers", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["key"] == "000000016"
    assert run("verify", [str(tmp_path / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_index_and_its_options(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "indexes"
    assert run("index", [str(dataset), "--out", str(out), "--workers", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["totals"]["samples"], report["num_shards"]) == ("native", 40, 3)
    assert run("index", [str(dataset), "--out", str(out), "--workers", "1", "--overwrite"]) == 0
    assert "left out" in capsys.readouterr().out
    assert run("index", [str(dataset), "--tags", "user_tag=human"]) == 2
    assert "--tags belongs to a layout, and none is named" in capsys.readouterr().err


def test_stats_in_terminal_json_and_page(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "stats.html"
    processor = tmp_path / "qwen"
    build_processor("qwen2_5_vl").save_pretrained(processor)
    assert run("stats", [str(dataset), "--html", str(page), "--processor", str(processor)]) == 0
    output = capsys.readouterr().out
    assert "text per sample (tokens): 40 values" in output
    assert "sample length (tokens): 40 values" in output
    assert "█" in output
    text = page.read_text()
    assert "<script" not in text
    assert "://" not in text.replace(str(dataset), "")
    found = dataset_stats(str(dataset))
    assert text.count("<svg") == len(found.histograms) + 1
    for svg in text.split("<svg")[1:]:
        ET.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
    assert run("stats", [str(dataset), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["samples"] == 40


def test_recount(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processor = tmp_path / "qwen"
    build_processor("qwen2_5_vl").save_pretrained(processor)
    copy = Path(shutil.copytree(dataset, tmp_path / "copy"))
    assert run("recount", [str(copy), "--processor", str(processor), "--workers", "1"]) == 0
    assert "samples changed, 0 refused" in capsys.readouterr().out
    assert run("verify", [str(copy), "--workers", "1"]) == 0


def test_sizes_and_mappings_as_people_write_them() -> None:
    assert [parse_bytes(text) for text in ("1", "2k", "1.5GB", "1GiB", "3 MB")] == [
        1,
        2000,
        1_500_000_000,
        2**30,
        3_000_000,
    ]
    with pytest.raises(ArgumentTypeError, match="'1 parsec' is not a size"):
        parse_bytes("1 parsec")
    assert parse_mapping(None) == {}
    with pytest.raises(ConfigError, match="'a' is not of the form name=value"):
        parse_mapping("a")
    assert [human_bytes(size) for size in (0, 999, 1000, 5.5e13)] == ["0 B", "999 B", "1.00 kB", "55.00 TB"]


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress("work") as progress:
        progress.step(4, samples=10, num_bytes=1000, bad=1)
        progress.step(4, samples=10, num_bytes=1000)
        assert progress._bar.tasks[0].completed == 2
        assert progress._bar.tasks[0].total == 4
        assert "1 bad" in progress._bar.tasks[0].fields["rates"]
        assert "samples/s" in progress._bar.tasks[0].fields["rates"]


def test_progress_counts_what_its_tasks_are(capsys: pytest.CaptureFixture[str]) -> None:
    for unit in ({}, {"unit": "records"}):
        with Progress("work", **unit) as progress:
            progress.step(4, samples=1)
    assert re.findall(r"work: 1/4 (\w+), 1 samples", capsys.readouterr().err) == ["shards", "records"]
