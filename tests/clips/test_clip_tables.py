"""Tables of clips: from the file and back through their bytes; cut frames are those of a decode of the whole file."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.video_corpus import CLIPS, WHOLE, clip
from vlm_stream.clips import (
    ClipItem,
    ClipTable,
    Codec,
    PickedClip,
    SampleTable,
    cut_clip,
    cut_to_items,
    decode_sample,
    encode_sample,
    parse_clip,
    spare_ranges,
)
from vlm_stream.errors import BadSampleError
from vlm_stream.media import check_container, decode_video
from vlm_stream.storage import crc32c_of

FACTS = (0, 0, 0, 0.0, 0.0)
COLUMNS = ("offset", "size", "pts", "shown", "begins", "crc32c")


def _same(one: ClipTable, other: ClipTable) -> bool:
    columns = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)
    facts = ("codec", "is_plain", "rate", "start")
    return columns and all(getattr(one, name) == getattr(other, name) for name in facts)


def _parse(data: bytes) -> ClipTable | str:
    return parse_clip(data, check_container(data, "convert"))


@functools.cache
def _all_frames(name: str) -> list[np.ndarray]:
    """Decode the whole file from front to back."""
    frames = {}
    with av.open(io.BytesIO(clip(name))) as container:
        for frame in container.decode(video=0):
            frames[frame.pts] = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
    return [frames[pts] for pts in sorted(frames)]


def _decode(table: ClipTable, data: bytes, frames, threads: int = 1) -> dict[int, np.ndarray]:
    """Decode some frames from their ranges alone."""
    cut = cut_clip(table, frames)
    view = memoryview(data)
    ranges = [[view[begin : begin + size] for begin, size, _ in run.ranges] for run in cut.runs]
    assert all(
        crc32c_of(part) == crc
        for run, parts in zip(cut.runs, ranges, strict=True)
        for part, (*_, crc) in zip(parts, run.ranges, strict=True)
    )
    found = {}
    PickedClip(cut, FACTS, ranges, threads=threads).decode(frames, found.__setitem__)
    return found


@pytest.mark.parametrize("name", [name for name in CLIPS if name not in WHOLE])
def test_frames_of_ranges_are_those_of_the_whole_file(name):
    table = _parse(clip(name))
    assert isinstance(table, ClipTable), table
    table = ClipTable.from_bytes(table.to_bytes())
    frames = _all_frames(name)
    assert table.num_frames == len(frames)
    alone = [[index] for index in range(len(frames))]
    for picks in (*alone, range(0, len(frames), 7), range(len(frames))):
        found = _decode(table, clip(name), picks)
        assert found.keys() == set(picks)
        assert all(np.array_equal(found[index], frames[index]) for index in picks)


@pytest.mark.parametrize("name", [name for name in CLIPS if name not in WHOLE])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_picks_give_the_frames_of_the_whole_file(name, data):
    frames = _all_frames(name)
    picks = data.draw(st.lists(st.integers(0, len(frames) - 1), min_size=1, max_size=8))
    found = _decode(_table(name), clip(name), picks)
    assert all(np.array_equal(found[index], frames[index]) for index in picks)


@pytest.mark.parametrize("name", [name for name in CLIPS if name not in WHOLE])
def test_the_table_of_a_part_gives_the_frames_of_the_whole_file(name):
    table, frames = _table(name), _all_frames(name)
    num_frames = len(frames)
    for first, length in ((0, num_frames), (num_frames // 2, 1), (num_frames // 3, num_frames // 4 or 1)):
        picks = range(first, first + length)
        items = (ClipItem("a", None, (0.0, 1.0, first, length)), ClipItem(None, None))
        (item, _), clips = cut_to_items(items, {"a": table})
        assert ClipTable.from_bytes(clips["a"].to_bytes()).num_gops <= table.num_gops
        moved = item.span[2]
        found = _decode(clips["a"], clip(name), range(moved, moved + length))
        assert all(np.array_equal(found[moved + at], frames[index]) for at, index in enumerate(picks))
        assert np.array_equal(clips["a"].times[moved : moved + length], table.times[first : first + length])


@pytest.mark.parametrize("name", ["h264_sound.mp4", "h264_open.mkv", "hevc.mkv", "vp9.webm", "av1.mp4"])
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_give_the_same_frames_and_end_with_the_clip(name, threads):
    before = threading.active_count()
    picks = [0, 3, 12, 27, 33, 49]
    one, several = (_decode(_table(name), clip(name), picks, number) for number in (1, threads))
    assert threading.active_count() == before
    assert one.keys() == several.keys()
    assert all(np.array_equal(one[index], several[index]) for index in picks)


@functools.cache
def _table(name: str) -> ClipTable:
    table = _parse(clip(name))
    assert isinstance(table, ClipTable)
    return table


NOT_PLAIN = {
    *(
        "h264_open.mp4",
        "h264_open.mkv",
        "h264_refresh.mp4",
        "h264_10bit.mp4",
        "h264_interlaced.mp4",
        "h264_no_stss.mp4",
    ),
    *("h264_edit.mp4", "hevc_open.mp4", "hevc_10bit.mp4", "vp9_10bit.webm", "av1_no_stss.mp4", "av1_10bit.mp4"),
    "vp8_hidden.webm",
}
OTHER_COLOURS = {"h264_10bit.mp4", "h264_interlaced.mp4", "hevc_10bit.mp4", "vp9_10bit.webm", "av1_10bit.mp4"}
"""Libraries make other colours of them, of every frame."""


def _unread(name: str, backend: str) -> str:
    """Return what a library says of a clip that it does not read."""
    if name in ("h264_edit.mp4", "vp8_hidden.webm") and backend != "auto":
        return f"{backend} sees other frames than the file shows; decode it with video_backend='av'"
    is_odd = name.startswith("av1") or name == "vp9_no_cues.webm"
    return "cannot be decoded by decord" if is_odd and backend == "decord" else ""


@pytest.mark.parametrize("backend", ["auto", "decord", "torchcodec"])
@pytest.mark.parametrize("name", [name for name in CLIPS if name not in WHOLE])
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_every_library_gives_the_frames_of_a_decode_from_front_to_back(name, backend, data):
    if backend != "auto" and importlib.util.find_spec(backend) is None:
        pytest.skip(f"the video backend {backend} is not installed")
    frames, table = _all_frames(name), _table(name)
    assert table.is_plain == (name not in NOT_PLAIN)
    picks = data.draw(st.lists(st.integers(0, len(frames) - 1), min_size=1, max_size=8))
    if words := _unread(name, backend):
        with pytest.raises(BadSampleError, match=words):
            decode_video(clip(name), lambda _: picks, backend)
        return
    video = decode_video(clip(name), lambda _: picks, backend)
    assert video.info.frames == len(frames)
    if backend == "auto":  # torchcodec says another average rate of variable ones
        told = (table.num_frames, *table.sides, table.fps)
        assert told == (video.info.frames, video.info.height, video.info.width, video.info.fps)
        assert video.info.seconds == told[0] / told[3]
    if backend != "auto" and name in OTHER_COLOURS:
        frames = _own_frames(name, backend)
    assert all(np.array_equal(frame, frames[index]) for frame, index in zip(video.frames, picks, strict=True))


def _own_frames(name: str, backend: str) -> list[np.ndarray]:
    """Decode the whole file from front to back by one of the other libraries."""
    if backend == "decord":
        reader = importlib.import_module("decord").VideoReader(io.BytesIO(clip(name)), num_threads=1)
        return [reader.next().asnumpy() for _ in range(len(reader))]
    decoder = importlib.import_module("torchcodec.decoders").VideoDecoder
    return [frame.numpy() for frame in decoder(clip(name), dimension_order="NHWC", seek_mode="exact")]


@pytest.mark.parametrize("name", [name for name in CLIPS if name != "h264_joined.mkv"])  # pictures of two sizes
@pytest.mark.parametrize("number", [1, 9])
def test_pyav_finds_frames_in_whole_files(name, number):
    frames = _all_frames(name)
    for first in range(0, len(frames), 7):
        picks = np.rint(np.linspace(first, len(frames) - 1, number)).astype(int).tolist()
        video = decode_video(clip(name), lambda _, picks=picks: picks, "av")
        assert video.info.frames == len(frames)
        assert all(np.array_equal(frame, frames[index]) for frame, index in zip(video.frames, picks, strict=True))


@pytest.mark.parametrize("name", WHOLE)
def test_what_has_no_table_says_why(name):
    assert _parse(clip(name)) == WHOLE[name]


@pytest.mark.parametrize("data", [b"", b"no clip at all" * 100])
def test_bytes_that_are_no_clip_have_no_table(data):
    assert "FFmpeg cannot walk it" in parse_clip(data, "mov")


def test_ffmpeg_is_told_the_container():
    assert "FFmpeg cannot walk it" in parse_clip(clip("h264.ts"), "mov")


def test_a_file_cut_short_has_a_table_of_what_is_there_or_none():
    data = clip("h264_faststart.mp4")
    table = _parse(data[: len(data) * 2 // 3])
    assert isinstance(table, str) or table.num_frames < len(_all_frames("h264_faststart.mp4"))


def test_fewer_packets_than_the_file_has_are_decoded():
    table = _table("h264_sound.mp4")
    assert cut_clip(table, [0]).num_packets == 1
    assert cut_clip(table, [0, 49]).num_packets <= 11
    first, second = cut_clip(table, [0, 49]).runs
    assert sum(size for _, size, _ in (*first.ranges, *second.ranges)) < len(clip("h264_sound.mp4")) / 2
    assert second.seconds == (1.6,)


def test_what_makes_tables_comes_with_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = {each.partition(">=")[0]: each for each in project["dependencies"]}
    assert {"av", "decord"} <= names.keys()
    assert ";" not in names["av"]  # on every machine


def test_a_slow_refresh_is_no_place_to_begin():
    assert _table("h264_refresh.mp4").num_gops == 1
    assert _table("h264_sound.mp4").num_gops == 5


def test_a_file_whose_index_calls_every_picture_a_keyframe_is_decoded_by_pyav_alone():
    assert _table("h264_sound.mp4").is_plain
    lying = _table("h264_no_stss.mp4")
    assert lying.num_gops == 5
    assert not lying.is_plain


def test_the_corpus_has_what_its_names_say():
    assert b"stss" not in clip("h264_no_stss.mp4")
    assert b"co64" in clip("h264_co64.mp4")
    assert b"stco" not in clip("h264_co64.mp4")
    assert b"avc3" in clip("h264_inband.mp4")
    assert b"hev1" in clip("hevc_inband.mp4")
    assert bytes.fromhex("1c53bb6b") in clip("vp9.webm")  # cues
    assert bytes.fromhex("1c53bb6b") not in clip("vp9_no_cues.webm")
    assert not _table("vp8_hidden.webm").shown.all()
    table = _table("h264_hour.mp4")
    assert table.seconds(int(table.frames[-1])) == 3592


def test_pictures_of_another_size_than_the_first_are_refused():
    table = _table("h264_sound.mp4")
    cut = cut_clip(replace(table, codec=table.codec._replace(height=66)), [0])
    ranges = [[memoryview(clip("h264_sound.mp4"))[begin : begin + size] for begin, size, _ in cut.runs[0].ranges]]
    with pytest.raises(BadSampleError, match=r"frame 0 has 96x64 pixels, the clip begins with 96x66"):
        PickedClip(cut, FACTS, ranges).decode([0], {}.__setitem__)


def test_damaged_bytes_are_a_bad_sample_that_names_the_time():
    table, data = _table("h264_sound.mp4"), bytearray(clip("h264_sound.mp4"))
    begin, size = table.gop_range(3)
    data[begin : begin + size] = bytes(size)
    cut = cut_clip(table, [0, 32])
    ranges = [[memoryview(data)[begin : begin + size] for begin, size, _ in run.ranges] for run in cut.runs]
    for threads in (1, 2):
        with pytest.raises(BadSampleError, match=r"1\.20 s"):
            PickedClip(cut, FACTS, ranges, threads=threads).decode([0, 32], {}.__setitem__)


numbers = st.integers(-(2**62), 2**62)


@st.composite
def tables(draw):
    sizes = draw(st.lists(st.integers(1, 2**40), min_size=1, max_size=40))
    gaps = draw(st.lists(st.integers(0, 2**40), min_size=len(sizes), max_size=len(sizes)))
    ends = np.cumsum(np.array(sizes) + np.array(gaps))
    begins = sorted({0, *draw(st.lists(st.integers(0, len(sizes) - 1), max_size=6))})
    crcs = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(begins), max_size=len(begins)))
    shown = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)).filter(any))
    return ClipTable(
        codec=Codec(
            name=draw(st.sampled_from(["h264", "vp9"])),
            extradata=draw(st.binary(max_size=60)),
            width=draw(st.integers(1, 9000)),
            height=draw(st.integers(1, 9000)),
            colour=(draw(st.integers(0, 20)), 1, 2, 3),
            turns=draw(st.integers(0, 3)),
            time_base=(1, draw(st.integers(1, 10**6))),
        ),
        is_plain=draw(st.booleans()),
        rate=(draw(st.integers(0, 10**5)), 1001),
        start=draw(st.integers(-(2**40), 2**40)),
        offset=ends - np.array(sizes),
        size=np.array(sizes),
        pts=np.array(draw(st.lists(st.integers(-(2**40), 2**40), min_size=len(sizes), max_size=len(sizes)))),
        shown=np.array(shown),
        begins=np.array(begins),
        crc32c=np.array(crcs),
    )


@given(tables())
def test_a_table_comes_back_from_its_bytes(table):
    assert _same(ClipTable.from_bytes(table.to_bytes()), table)


@given(
    st.lists(tables(), max_size=3),
    st.lists(st.none() | st.lists(st.integers(0, 99)).map(tuple), max_size=4),
    st.lists(st.integers(0, 2**32 - 1), max_size=3),
)
def test_the_tables_of_a_sample_come_back(clips, named, rest):
    items = (
        *(ClipItem(None, each) for each in named),
        *(ClipItem(f"{number}.mp4", None) for number in range(len(clips))),
    )
    given_table = SampleTable(items, {f"{number}.mp4": table for number, table in enumerate(clips)}, tuple(rest))
    found = decode_sample(encode_sample(given_table))
    assert (found.items, found.rest, list(found.clips)) == (items, tuple(rest), list(given_table.clips))
    assert all(_same(found.clips[name], table) for name, table in given_table.clips.items())


@given(st.binary(max_size=200))
def test_other_bytes_are_no_table(data):
    with pytest.raises(ValueError, match=r"."):
        decode_sample(data)


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4), st.integers(0, 9))
def test_clips_and_the_rest_cover_a_sample_once(begin, parts, tail):
    at, clips = begin, []
    for gap, size in parts:
        clips.append((at + gap, size))
        at += gap + size
    ranges = sorted([*clips, *spare_ranges(begin, at + tail, clips)])
    covered = [byte for offset, size in ranges for byte in range(offset, offset + size)]
    assert covered == list(range(begin, at + tail))
