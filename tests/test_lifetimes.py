"""Folders that end with their process, however that ends."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_stream.lifetimes import make_folder, remove_folder

SPILL = """
from vlm_stream.sources import open_source
tempfile.tempdir = sys.argv[2]
source = open_source(sys.argv[1])
"""
CHAOS = """
from pathlib import Path
from vlm_stream.chaos import run
tempfile.tempdir = sys.argv[2]

class FillsFolder:
    def __init__(self, arguments, folder):
        Path(folder, "copy").write_bytes(bytes(100))

    def __enter__(self):
        print("made", flush=True)
        time.sleep(600)

    def __exit__(self, *_):
        pass

run.Stage = FillsFolder
run.run_chaos({}, run.ChaosOptions(), print)
"""
WAIT = """
print("made", flush=True)
time.sleep(600)
"""


def start(code: str, data: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"import sys, tempfile, time{code}{WAIT}", str(data), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("code", [SPILL, CHAOS])
def test_what_a_killed_process_has_filled_is_removed_by_the_next(code: str, tmp_path: Path) -> None:
    data, folder = tmp_path / "a.jsonl.gz", tmp_path / "temporary"
    record = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    data.write_bytes(gzip.compress(record))
    folder.mkdir()
    (folder / "vlm-stream-mine").mkdir()  # without a lock it is not known to be dead
    first = start(code, data, folder)
    (living,) = set(folder.iterdir()) - {folder / "vlm-stream-mine"}
    dead = start(code, data, folder)
    (left,) = set(folder.iterdir()) - {folder / "vlm-stream-mine", living}
    end(dead)
    assert any(left.iterdir())
    last = start(code, data, folder)
    assert not left.exists()
    assert any(living.iterdir())
    assert (folder / "vlm-stream-mine").exists()
    end(first)
    end(last)


def test_folders_of_others_and_links_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, elsewhere = tmp_path / "x-dead", tmp_path / "elsewhere"
    for place in (dead, elsewhere):
        place.mkdir()
        (place / "lock").touch()
    (tmp_path / "x-link").symlink_to(elsewhere)
    (tmp_path / "x-pipe").mkdir()
    os.mkfifo(tmp_path / "x-pipe" / "lock")  # to open it would take for ever
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    remove_folder(make_folder("x-", str(tmp_path)))
    assert dead.exists()
    monkeypatch.undo()
    place = make_folder("x-", str(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["elsewhere", "x-link", "x-pipe", place.name])
    assert (elsewhere / "lock").exists()
    remove_folder(place)
    assert not place.exists()
