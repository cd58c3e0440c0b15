"""What stands in a dataset is printed, and not obeyed: neither by a terminal nor as markup."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.forge import forge_manifest
from vlm_stream.cli import main

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]not red[/red][/nothing]"


@pytest.fixture
def evil(toy_shards: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(toy_shards, tmp_path / "evil"))

    def change(data: dict) -> None:
        data["dropped"] = {EVIL: 3}
        data["tokens"]["processor"] = EVIL
        entries = data["shards"]["entries"]
        data["shards"]["entries"] = {f"{name}{EVIL}": counts for name, counts in entries.items()}

    forge_manifest(folder, change)
    return folder


@pytest.mark.parametrize("more", [[], ["--html", "page.html"]])
def test_stats_of_a_hostile_manifest(
    evil: Path, more: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["stats", str(evil), *more]) == 0
    out = "".join(capsys.readouterr())
    assert all(line.isprintable() for line in out.splitlines())
    assert r"x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]not red[/red][/nothing]" in out


def test_an_error_with_a_hostile_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", f"/nowhere/{EVIL}"]) != 0
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())
