"""Two conversions into one target: one after the other. What a kill leaves is removed by the next call."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_stream.cli import main
from vlm_stream.convert import make_shards
from vlm_stream.convert.alone import alone
from vlm_stream.storage import open_store

TOOL = Path(__file__).parents[2] / "tools" / "make_shards.py"


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_two_converters_of_one_target_leave_a_whole_dataset(
    toy_meta: Path, tmp_path: Path, overwrite: list[str], digests
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(TOOL), str(toy_meta), str(out), "--samples-per-shard", "4", "--max-shard-bytes",
               "100000", "--workers", "1", *overwrite]  # fmt: skip
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert main(["verify", str(out), "--workers", "1", "--quiet"]) == 0
    make_shards(toy_meta, tmp_path / "other", samples_per_shard=4, max_shard_bytes=100_000, workers=1)
    assert digests(out) == digests(tmp_path / "other")  # and no lock is left


def test_whoever_comes_second_waits_and_says_so(toy_meta: Path, tmp_path: Path) -> None:
    out, store = tmp_path / "out", open_store(str(tmp_path / "out"))
    command = [sys.executable, str(TOOL), str(toy_meta), str(out), "--workers", "1"]
    with alone(store, ".convert.lock", "converts into", store.root):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        line = next(line for line in process.stderr if "waiting for it" in line)
        assert f"another process converts into {store.root}" in line
        assert not (out / "dataset.json").exists()
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 0, rest
    assert (out / "dataset.json").exists()


def test_a_lock_that_a_killed_process_has_left_keeps_nobody_out(toy_meta: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".convert.lock").touch()
    assert make_shards(toy_meta, tmp_path / "out", samples_per_shard=64).num_shards == 4
    assert not (tmp_path / "out" / ".convert.lock").exists()


def test_a_folder_that_takes_no_lock_is_locked_elsewhere(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "out").write_text("a file")
    store = open_store(str(tmp_path / "out"))
    with caplog.at_level(logging.WARNING), alone(store, "x.lock", "does", "it"):
        assert len(list((tmp_path / "cache").rglob("*.lock"))) == 1
    assert not list((tmp_path / "cache").rglob("*.lock"))


def test_what_a_kill_behind_the_manifest_leaves_is_removed(toy_meta: Path, tmp_path: Path, digests) -> None:
    out = tmp_path / "out"
    make_shards(toy_meta, out, samples_per_shard=64)
    whole = digests(out)
    (out / ".job").mkdir()
    (out / ".job" / "job.json").write_text(json.dumps({}))
    (out / ".vlm-stream-0123").write_text("half of a tar")
    report = make_shards(toy_meta, out, samples_per_shard=64)
    assert report.num_kept == report.num_shards
    assert digests(out) == whole
    assert not (out / ".job").exists()
