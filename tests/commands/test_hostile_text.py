"""What stands in a dataset is printed, and not obeyed: neither by a terminal nor as markup."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.forge import forge_manifest
from vlm_stream.cli import main
from vlm_stream.testing import make_jpeg

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


@pytest.mark.parametrize("command", [["bench"], ["replay", "--step", "0", "--out", "batch.pt"]])
def test_a_bad_sample_with_a_hostile_name(
    command: list[str],
    saved_processor: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key with the end of a markup that has not begun, and with what clears a screen."""
    monkeypatch.chdir(tmp_path)
    whole = make_jpeg(200, 200)
    members = {"bad\x1b[2J[/red]": whole[: len(whole) // 2]} | {f"good{number}": whole for number in range(6)}
    with tarfile.open("x.tar", "w") as tar:
        for key, image in members.items():
            for name, data in ((f"{key}.jpg", image), (f"{key}.txt", b"A picture of something.")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    assert main(["index", "x.tar", "--prompt", "What?", "--layout", "caption"]) in (0, 1)
    options = ["--processor", str(saved_processor), "--pack-size", "2048", "--set", "num_workers=0"]
    assert main([*command, "x.tar", *options, "--set", "bad_budget=null"]) == 0
    said = "".join(capsys.readouterr())
    assert all(line.isprintable() for line in said.splitlines())
    assert r"bad\x1b[2J[/red]" in said
