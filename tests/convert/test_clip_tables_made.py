"""Conversion of the corpus of clips: which get a table, and why the others have none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.video_corpus import WHOLE, clip
from vlm_stream.cli import main
from vlm_stream.clips import decode_sample
from vlm_stream.convert import IndexOptions, ShardReport, clip_tables, dataset_stats, index_tars, make_shards
from vlm_stream.format import IndexCache, OpenDataset

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ONE_GROUP = {"h264_one_gop.mp4", "h264_one_frame.mp4", "h264_refresh.mp4"}
BY_FRAMES = {
    *("h264_sound.mp4", "h264_open.mkv", "h264_vfr.mp4", "h264_no_stss.mp4", "h264_edit.mp4", "vp9_no_cues.webm"),
    "av1_10bit.mp4",
}
NAMES = (*sorted(BY_FRAMES | ONE_GROUP), *WHOLE)


def _convert(folder: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[str] = NAMES) -> ShardReport:
    """Convert a part of the corpus as if its clips were large."""
    monkeypatch.setattr(clip_tables, "_LEAST_BYTES", 1)
    lines = []
    for name in names:
        (folder / name).write_bytes(clip(name))
        items = [{"type": "video", "video": name}, {"type": "text", "text": "What?"}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": "A clip."}]}
        lines.append({"id": name, "conversation": [{"role": "user", "content": items}, answer]})
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = folder / "out"
    return make_shards(folder / "records.jsonl", out, media_dir=str(folder), workers=1, bad_budget=0.2)


def _tables(folder: Path) -> dict[str, Any]:
    dataset = OpenDataset(str(folder), None, IndexCache())
    found = {}
    for index in dataset.indexes():
        for row in range(len(index)):
            place = index.table(row)
            found[index.own_id(row)] = None if place is None else decode_sample(dataset.tables([place])[0].result())
    return found


def test_the_corpus_is_converted_and_clips_without_a_table_are_counted_by_reason(tmp_path, monkeypatch, capsys):
    report = _convert(tmp_path, monkeypatch)
    tables = _tables(tmp_path / "out")
    without = {name for name, table in tables.items() if table is None}
    assert without == (WHOLE.keys() | ONE_GROUP) & tables.keys()
    assert set(NAMES) - tables.keys() <= {"gif.gif", "h264_joined.mkv"}  # of which some library reads nothing
    expected = {reason: 1 for name, reason in WHOLE.items() if name in tables}
    expected |= {"it is one group of pictures": len(ONE_GROUP)}
    assert report.whole == expected
    stats = dataset_stats(str(tmp_path / "out"))
    assert stats.whole == expected
    assert main(["stats", str(tmp_path / "out")]) == 0
    assert "clips without a table, the codec is mpeg4" in capsys.readouterr().out
    indexed = index_tars([str(tmp_path / "out" / "*.tar")], IndexOptions(out=str(tmp_path / "again"), workers=1))
    assert indexed.whole == expected


def test_small_clips_are_not_counted(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        assert _convert(tmp_path, patch, ["mpeg4.avi"]).whole == {"the container is avi": 1}
    assert make_shards(tmp_path / "records.jsonl", tmp_path / "other", media_dir=str(tmp_path), workers=1).whole == {}
