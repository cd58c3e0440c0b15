"""A processor's own code is never run but by an explicit option, whichever way it is named."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vlm_stream import StreamLoader, VLMStream
from vlm_stream.cli import main
from vlm_stream.convert import make_shards, precount, recount
from vlm_stream.errors import ConfigError, VlmStreamError
from vlm_stream.mapstyle.audio import SOURCES
from vlm_stream.processors import load_processor, open_processor

CODE = """
from pathlib import Path
Path({marker!r}).write_text("it ran")
from transformers import Qwen2_5_VLProcessor


class OwnProcessor(Qwen2_5_VLProcessor):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def remote(saved_processor: Path, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A saved processor that brings its own code, which writes a file when it is run."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = Path(shutil.copytree(saved_processor, tmp_path / "remote"))
    (folder / "own_code.py").write_text(CODE.format(marker=str(marker)))
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = folder / name
        data = json.loads(path.read_text()) if path.exists() else {}
        data |= {"processor_class": "OwnProcessor", "auto_map": {"AutoProcessor": "own_code.OwnProcessor"}}
        path.write_text(json.dumps(data))
    return str(folder)


ENTRIES: dict[str, Any] = {
    "load_processor": lambda remote, *_: load_processor(remote),
    "a mapping": lambda remote, *_: open_processor({"name": remote}),
    "a mapping that says no": lambda remote, *_: open_processor({"name": remote, "trust_remote_code": False}),
    "StreamLoader": lambda remote, shards, *_: next(iter(StreamLoader(shards, processor=remote, pack_size=512))),
    "VLMStream": lambda remote, shards, *_: next(iter(VLMStream(shards, processor={"name": remote}, pack_size=512))),
    "make_shards": lambda remote, _, meta, out: make_shards(meta, out, processor=remote),
    "recount": lambda remote, shards, *_: recount(shards, remote),
    "precount": lambda remote, _, meta, out: precount(_data_of(meta), out, processor=remote),
}


def _data_of(meta: str) -> str:
    return str(next(Path(meta).parent.rglob("*.jsonl")))


@pytest.mark.parametrize("name", ENTRIES)
def test_code_is_not_run_by_python(
    name: str, remote: str, marker: Path, toy_shards: Path, toy_meta: Path, tmp_path: Path
) -> None:
    with pytest.raises(VlmStreamError, match=r"brings its own code: pass trust_remote_code"):
        ENTRIES[name](remote, str(toy_shards), str(toy_meta), str(tmp_path / "out"))
    assert not marker.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["stats", "SHARDS"],
        ["recount", "SHARDS"],
        ["make-shards", "META", "--out", "OUT"],
        ["index", "SHARDS", "--out", "OUT"],
        ["plan", "SHARDS", "--pack-size", "512"],
        ["bench", "SHARDS", "--pack-size", "512"],
        ["show", "SHARDS", "--pack-size", "512", "--step", "0"],
        ["where", "SHARDS", "--pack-size", "512", "--step", "0"],
        ["replay", "SHARDS", "--pack-size", "512", "--step", "0"],
        ["chaos", "SHARDS", "--pack-size", "512", "--minutes", "0.01"],
    ],
    ids=lambda words: words[0],
)
def test_code_is_not_run_by_a_command(
    words: list[str], remote: str, marker: Path, toy_shards: Path, toy_meta: Path, tmp_path: Path
) -> None:
    shards = shutil.copytree(toy_shards, tmp_path / "shards")
    places = {"SHARDS": str(shards), "META": str(toy_meta), "OUT": str(tmp_path / "out")}
    try:
        code = main([places.get(word, word) for word in words] + ["--processor", remote])
    except SystemExit as error:
        code = int(str(error.code))
    assert code not in (0, None)
    assert not marker.exists()


def test_no_corpus_of_the_usual_mix_brings_code() -> None:
    assert not any(source.trust_remote_code for source in SOURCES)


def test_code_runs_when_it_is_asked_for(remote: str, marker: Path) -> None:
    """The other tests would see it."""
    with contextlib.suppress(ConfigError):
        load_processor(remote, trust_remote_code=True)
    assert marker.exists()
