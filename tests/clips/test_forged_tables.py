"""Tables that somebody has forged end no run: clips are read whole, and a line says so."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.forge import forge_index
from tests.video_corpus import clip
from vlm_stream import StreamLoader
from vlm_stream.clips import ClipItem, ClipTable, SampleTable, decode_sample, encode_sample, parse_clip
from vlm_stream.convert import clip_tables, make_shards
from vlm_stream.cutting import Cutter
from vlm_stream.format import Drawn, TablePlace
from vlm_stream.options import StreamOptions
from vlm_stream.storage import ReadOptions, Span, crc32c_of
from vlm_stream.tokens import FrameRule, MediaSizes, VideoSize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "h264_sound.mp4"
WHOLE = (ClipItem("0.mp4", None),)


def _table() -> ClipTable:
    table = parse_clip(clip(NAME), "mov")
    assert isinstance(table, ClipTable)
    return table


def _drawn() -> Drawn:
    size = len(clip(NAME))
    span = Span("memory://x", "a.tar", 0, size + 2048, 1, (("json", 512, 100), ("0.mp4", 1536, size)))
    video = VideoSize(frames=50, height=64, width=96, fps=25.0, seconds=2.0)
    return Drawn("k", span, MediaSizes(videos=(video,)), "e", None, TablePlace("c", 0, 1, 1, (5,)))


def _codec(**changes: Any) -> Callable[[ClipTable], ClipTable]:
    return lambda table: replace(table, codec=table.codec._replace(**changes))


def _columns(*names: str, length: int) -> Callable[[ClipTable], ClipTable]:
    return lambda table: replace(table, **{name: getattr(table, name)[:length] for name in names})


FORGED: dict[str, tuple[Callable[[ClipTable], ClipTable], str]] = {
    "few checksums": (_columns("crc32c", length=1), "columns of a table do not fit"),
    "few times": (_columns("pts", length=3), "columns of a table do not fit"),
    "few packets": (_columns("offset", "size", length=3), "columns of a table do not fit"),
    "fewer frames": (_columns("offset", "size", "pts", "shown", length=42), "otherwise than the index"),
    "nothing shown": (lambda table: replace(table, shown=np.zeros(50, bool)), "shows nothing"),
    "begins behind the end": (lambda table: replace(table, begins=np.array([0, 10, 20, 30, 900])), "do not fit"),
    "begins descend": (lambda table: replace(table, begins=np.array([0, 20, 10, 30, 40])), "numbers that no file has"),
    "places far away": (lambda table: replace(table, offset=table.offset + (1 << 40)), "places outside of 0.mp4"),
    "places below 0": (lambda table: replace(table, offset=table.offset - (1 << 20)), "numbers that no file has"),
    "no bytes": (lambda table: replace(table, size=0 * table.size), "numbers that no file has"),
    "times too far apart": (lambda table: replace(table, pts=table.pts * (1 << 40)), "numbers that no file has"),
    "a time base of 0": (_codec(time_base=(1, 0)), "no codec that is known"),
    "a time base of three": (_codec(time_base=(1, 1, 1)), "no codec that is known"),
    "a rate of text": (lambda table: replace(table, rate=("25", 1)), "no codec that is known"),
    "another decoder": (_codec(name="rawvideo"), "no codec that is known"),
    "another size": (_codec(width=30000, height=30000), "otherwise than the index"),
    "another rate": (lambda table: replace(table, rate=(24, 1)), "otherwise than the index"),
}


def _bytes(table: ClipTable, name: str = "0.mp4", items: tuple[ClipItem, ...] = WHOLE) -> bytes:
    return encode_sample(SampleTable(items, {name: table}, (1, 2)))


@pytest.fixture
def refused(caplog: pytest.LogCaptureFixture) -> Callable[[bytes, str], None]:
    def check(data: bytes, words: str) -> None:
        cutter = Cutter(FrameRule(fps=None, max_frames=4), ReadOptions(max_gap_bytes=0))
        assert cutter.cut(_drawn(), data) is None
        assert cutter.cut(_drawn(), data) is None
        (told,) = [record.getMessage() for record in caplog.records]
        assert words in told
        assert "so its clips are read whole; write tables again with: vlm-stream index" in told

    return check


@pytest.mark.parametrize("name", FORGED)
def test_a_table_that_no_clip_has_is_refused(name, refused):
    change, words = FORGED[name]
    refused(_bytes(change(_table())), words)


def test_the_table_as_it_was_is_taken(caplog):
    cutter = Cutter(FrameRule(fps=None, max_frames=2), ReadOptions(max_gap_bytes=0))
    assert cutter.cut(_drawn(), _bytes(_table())) is not None
    assert not caplog.records


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ((*WHOLE, *WHOLE), "of other videos"),
        ((ClipItem("7.mp4", None),), "not those of the videos that they name"),
        ((ClipItem("0.mp4", ("1",)),), "frames that are none"),
        ((ClipItem("0.mp4", None, (0.0, 1.0, 60, 50)),), "a part of a clip is not in its table"),
        ((ClipItem("0.mp4", None, (0.0, 1.0, -1, 50)),), "a part of a clip is not in its table"),
        ((ClipItem("0.mp4", None, ("0", 1.0, 0, 50)),), "no tables of a sample"),
    ],
)
def test_videos_that_no_sample_has_are_refused(items, words, refused):
    refused(_bytes(_table(), items=items), words)


def test_checksums_of_another_rest_are_refused(refused):
    refused(encode_sample(SampleTable(WHOLE, {"0.mp4": _table()}, (1, 2, 3))), "a sample with other members")


def test_tables_of_a_foreign_member_are_refused(refused):
    refused(_bytes(_table(), "9.mp4", (ClipItem("9.mp4", None),)), "places outside of 9.mp4")


@pytest.mark.parametrize("data", [b"[]\n", b"[" * 100_000, b'{"items":[],"clips":[["a",-1]],"rest":[]}\nxx', b"null\n"])
def test_bytes_that_are_no_tables_are_refused(data, refused):
    refused(data, "cannot be used")


def test_a_small_table_that_grows_without_end_is_refused(refused):
    bomb = zlib.compress(b"{}\n" + bytes(256 << 20), 1)
    head = {"items": [["0.mp4", None]], "clips": [["0.mp4", len(bomb)]], "rest": [1, 2]}
    data = json.dumps(head).encode() + b"\n" + bomb
    tracemalloc.start()
    refused(data, "larger than any")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 << 20


def test_a_run_over_forged_tables_reads_whole_clips(tmp_path, monkeypatch, processor, caplog):
    monkeypatch.setattr(clip_tables, "_LEAST_BYTES", 1)
    (tmp_path / NAME).write_bytes(clip(NAME))
    asked = [{"type": "video", "video": NAME}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A clip."}]}
    line = {"id": "a", "conversation": [{"role": "user", "content": asked}, answer]}
    (tmp_path / "records.jsonl").write_text(json.dumps(line) + "\n")
    folder = tmp_path / "out"
    make_shards(tmp_path / "records.jsonl", folder, media_dir=str(tmp_path), workers=1)
    _forge(folder, FORGED["few checksums"][0])
    options: dict[str, Any] = {"mode": "plain", "batch_size": 1, "max_frames": 4, "num_workers": 0}
    monkeypatch.setattr(StreamOptions, "read", lambda _: ReadOptions(max_gap_bytes=0))
    with StreamLoader(str(folder), processor=processor, **options) as loader:
        assert len(list(loader)) == 1
        assert loader.metrics()["bad_samples"] == 0
    assert [each for each in caplog.records if "the columns of a table do not fit each other" in each.getMessage()]


def _forge(folder: Path, change: Callable[[ClipTable], ClipTable]) -> None:
    """Write another table for the first sample, with an index and a manifest that describe it."""
    tables = folder / "shard-000000.clips.bin"
    sample = decode_sample(tables.read_bytes())
    data = encode_sample(replace(sample, clips={name: change(table) for name, table in sample.clips.items()}))
    tables.write_bytes(data)
    index = pq.read_table(folder / "shard-000000.index.parquet")
    place = pa.array([{"offset": 0, "size": len(data), "crc32c": crc32c_of(data)}], index.column("clips").type)
    forge_index(folder, 0, index.set_column(index.column_names.index("clips"), "clips", place))
