"""frames="keyframes": only keyframes are shown; counts are exact, and every way of reading gives the same batches."""

from __future__ import annotations

import functools
import io
import json
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.video_corpus import CLIPS, WHOLE, clip
from vlm_stream.clips import PickedClip, cut_clip
from vlm_stream.convert import IndexOptions, index_tars, make_shards
from vlm_stream.convert.clip_tables import ClipTables, make_table
from vlm_stream.convert.recount import recount
from vlm_stream.convert.sample import measure_item
from vlm_stream.errors import DatasetError
from vlm_stream.format import IndexCache, OpenDataset, read_table, write_table
from vlm_stream.media import decode_picked, decode_video
from vlm_stream.options import StreamOptions
from vlm_stream.planning import open_plan
from vlm_stream.recipe import normalise_sources
from vlm_stream.testing import build_processor, make_jpeg
from vlm_stream.tokens import FrameRule, count_decoded, count_frames, frame_indices, pack_steps, unpack_steps
from vlm_stream.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from vlm_stream.build import Delivery
    from vlm_stream.planning import Plan

SOURCE = "-f lavfi -i testsrc2=size=96x64:rate=25:duration=20,noise=alls=30:allf=t:all_seed=1"
X264 = "-c:v libx264 -preset veryfast -sc_threshold 0 -crf 12 -pix_fmt yuv420p"
LARGE = {"even.mp4": f"{X264} -g 20 -bf 2", "open.mp4": f"{X264} -g 35 -bf 3 -x264-params open-gop=1"}
SMALL = [
    "h264_sound.mp4",
    "h264_edit.mp4",
    "h264_vfr.mkv",
    "hevc_open.mp4",
    "vp9.webm",
    "h264_one_gop.mp4",
    "mpeg4.avi",
]
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "gemma4", "smolvlm"]
TABLED = [name for name in CLIPS if name not in WHOLE]


def _ask(own_id: str, *items: dict[str, Any]) -> dict[str, Any]:
    user = [*({"type": "video"} | item for item in items), {"type": "text", "text": "What is it?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A clip."}]}
    return {"id": own_id, "conversation": [{"role": "user", "content": user}, answer]}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    folder = tmp_path_factory.mktemp("clips")
    for name, arguments in LARGE.items():
        command = f"ffmpeg -loglevel error -nostdin {SOURCE} {arguments} {folder / name}"
        subprocess.run(command.split(), check=True, timeout=60)
    for name in SMALL:
        (folder / name).write_bytes(clip(name))
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(make_jpeg(64, 96))
    lines = [_ask(name, {"video": name}) for name in (*LARGE, *SMALL)]
    lines += [
        _ask("part", {"video": "even.mp4", "start": 8.0, "end": 15.5}),
        _ask("short", {"video": "even.mp4", "start": 0.1, "end": 0.5}),
        _ask("named", {"video": "even.mp4", "frame_indices": [3, 200, 407]}),
        _ask("two", {"video": "open.mp4"}, {"video": "h264_sound.mp4"}),
        _ask("list", {"video": ["0.jpg", "1.jpg", "2.jpg"], "fps": 1.0}),
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_shards(folder / "records.jsonl", folder / "out", media_dir=str(folder), workers=1)
    return folder / "out"


def _plan(folder: Path, processor: Any, **options: Any) -> Plan:
    chosen = {"mode": "plain", "batch_size": 1, "max_frames": 4, "frames": "keyframes", "with_refs": True} | options
    return open_plan(normalise_sources(str(folder)), StreamOptions(**chosen), processor)


def _build(plan: Plan) -> dict[str, Delivery]:
    with plan.build.open() as builder:
        made = {
            planned.blueprint.rows[0][0].id: builder.build(planned.blueprint)
            for planned in plan.blueprints(World(0, 1))
        }
    assert [bad for each in made.values() for bad in each.bad] == []
    return made


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one == other


@functools.cache
def _all_keyframes(name: str) -> list[int]:
    """Decode the whole file, and take the word of the decoder."""
    with av.open(io.BytesIO(clip(name))) as container:
        found = sorted((frame.pts, frame.key_frame) for frame in container.decode(video=0))
    return [place for place, (_, is_keyframe) in enumerate(found) if is_keyframe]


@pytest.mark.parametrize("name", [name for name in TABLED if "refresh" not in name])
def test_the_index_knows_the_keyframes_that_a_decoder_finds(name):
    size = measure_item({"type": "video", "video": "a"}, [clip(name)], ClipTables())
    assert list(size.keyframes) == _all_keyframes(name)
    assert unpack_steps(pack_steps(size.keyframes), size.frames) == list(size.keyframes)


@pytest.mark.parametrize("name", TABLED)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_rule_shows_keyframes_evenly_and_ranges_give_those_of_the_file(name, data):
    table, content = _table(name), clip(name)
    first = data.draw(st.integers(0, table.num_frames - 1))
    frames = data.draw(st.integers(1, table.num_frames - first))
    known = table.keyframes_of(first, frames)
    rule = FrameRule(
        fps=data.draw(st.none() | st.floats(0.2, 40)),
        min_frames=data.draw(st.integers(1, 5)),
        max_frames=data.draw(st.integers(1, 12)),
        temporal_patch_size=data.draw(st.integers(1, 3)),
        keyframes=True,
    )
    shown = frame_indices(frames, table.fps, rule, None, known)
    assert len(shown) == count_frames(frames, table.fps, rule, keyframes=len(known))
    ordinary = frame_indices(frames, table.fps, replace(rule, keyframes=False))
    if not known:
        assert shown.tolist() == ordinary.tolist()
        return
    assert set(shown.tolist()) <= set(known)
    distinct = np.unique(shown)
    assert len(distinct) == min(len(known), len(np.unique(ordinary)))
    gaps = np.diff(np.searchsorted(known, distinct))
    assert gaps.max(initial=1) - gaps.min(initial=len(known)) <= 1
    cut = cut_clip(table, (shown + first).tolist())
    assert cut.num_packets == len(distinct)
    ranges = [[memoryview(content)[begin : begin + size] for begin, size, _ in run.ranges] for run in cut.runs]
    facts = (table.num_frames, *table.sides, table.fps, 1.0)
    found = decode_picked(PickedClip(cut, facts, ranges), lambda _: (shown + first).tolist())
    whole = decode_video(content, lambda _: (shown + first).tolist())
    assert np.array_equal(found.frames, whole.frames)


@functools.cache
def _table(name: str) -> Any:
    return make_table(clip(name))


@pytest.fixture(scope="module", params=FAMILIES)
def counted(request, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A processor, and the dataset counted for it by its ordinary rule."""
    processor = build_processor(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "out"
    shutil.copytree(shards, folder)
    recount(str(folder), processor, workers=1)
    return processor, folder


def test_counts_are_exact_and_cut_clips_are_those_of_whole_files(counted, caplog):
    processor, folder = counted
    for options in ({}, {"fps": 1.0, "max_frames": 9}, {"fps": 25.0, "max_frames": 24}):
        plan = _plan(folder, processor, **options)
        by_frames, whole = _build(plan), _build(replace(plan, cutter=None))
        for name, made in by_frames.items():
            assert made.num_tokens == made.num_planned_tokens, (name, options)
            assert _same(made.batch, whole[name].batch), (name, options)
    (told,) = {record.message for record in caplog.records if "keyframes of some videos" in record.message}
    assert "(of '" in told


def test_other_frames_are_shown_than_by_the_ordinary_rule(shards, processor):
    found, ordinary = (_build(_plan(shards, processor, frames=frames)) for frames in ("keyframes", "all"))
    same = {name for name, made in found.items() if _same(made.batch, ordinary[name].batch)}
    assert same == {"mpeg4.avi", "short", "named", "list"}


def test_only_the_shown_keyframes_are_decoded(shards, processor):
    plan = _plan(shards, processor)
    pieces = {planned.blueprint.rows[0][0].id: planned.blueprint.rows[0][0] for planned in plan.blueprints(World(0, 1))}
    for name in LARGE:
        (cut,) = pieces[name].clips
        assert cut.cut.num_packets == len(pieces[name].sizes.videos[0].keyframes) == 4
    media = plan.datasets.opened[0].media([0])
    decoded, other = (
        count_decoded(media, rule) for rule in (plan.build.frames, replace(plan.build.frames, keyframes=False))
    )
    assert decoded[0] == round(4 * 96 * 64 / 1000) < other[0]
    assert decoded[11] == other[11]  # it names its frames


@pytest.mark.parametrize("backend", ["decord", "torchcodec"])
def test_other_libraries_show_the_same_keyframes(shards, processor, backend):
    if backend == "torchcodec":
        try:
            import torchcodec  # noqa: F401
        except (ImportError, OSError, RuntimeError):
            pytest.skip("torchcodec cannot be loaded here")
    else:
        pytest.importorskip("decord")
    plan, other = (_plan(shards, processor, video_backend=name) for name in ("av", backend))
    found = {
        planned.blueprint.rows[0][0].id: [video.keyframes for video in planned.blueprint.rows[0][0].sizes.videos]
        for planned in other.blueprints(World(0, 1))
    }
    with other.build.open() as builder:
        made = {each.blueprint.rows[0][0].id: builder.build(each.blueprint) for each in other.blueprints(World(0, 1))}
    av_made = _build(plan)
    for name in (*LARGE, "part", "h264_sound.mp4"):
        assert found[name][0]
        assert _same(made[name].batch, av_made[name].batch), name


def test_ranks_without_pixels_have_the_same_ids(shards, processor):
    with_pixels, without = _build(_plan(shards, processor)), _build(_plan(shards, processor, pixels=False))
    assert all(
        torch.equal(each.batch["input_ids"], without[name].batch["input_ids"]) for name, each in with_pixels.items()
    )


def test_the_column_is_read_only_where_it_is_asked_for(shards, processor, monkeypatch):
    asked = []

    def read(data: bytes, where: str, names: Any = None, **options: Any) -> Any:
        asked.append(names)
        return read_table(data, where, names, **options)

    for module in ("index", "media"):
        monkeypatch.setattr(f"vlm_stream.format.{module}.read_table", read)
    for frames, is_read in (("all", False), ("keyframes", True)):
        asked.clear()
        _build(_plan(shards, processor, frames=frames))
        assert len(asked) >= 2
        assert {"keyframes" in names for names in asked} == {is_read}


def test_an_older_index_says_how_to_write_it_anew(shards, processor, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    index = copy / "shard-000000.index.parquet"
    index.write_bytes(write_table(read_table(index.read_bytes(), "index").drop_columns(["keyframes"])))
    recorded = _rewritten(copy)
    assert len(_build(_plan(recorded, processor, frames="all"))) == 14
    with pytest.raises(DatasetError, match=r"older release.*vlm-stream index --overwrite"):
        _build(_plan(recorded, processor))
    index_tars([str(copy / "shard-000000.tar")], IndexOptions(workers=1, overwrite=True))
    again, converted = (_build(_plan(folder, processor)) for folder in (copy, shards))
    assert all(torch.equal(each.batch["input_ids"], converted[name].batch["input_ids"]) for name, each in again.items())


def _rewritten(folder: Path) -> Path:
    """Let the manifest say that its index is the one that is there."""
    from vlm_stream.format import ShardList, describe_shard, load_manifest, save_manifest
    from vlm_stream.storage import open_store

    store = open_store(str(folder))
    manifest = load_manifest(store)
    (shard,) = manifest.shards
    data = (folder / "shard-000000.index.parquet").read_bytes()
    entry = describe_shard(shard.name, data, num_bytes=shard.totals.bytes, crc32c=shard.crc32c, etag=shard.etag)
    save_manifest(store, replace(manifest, shards=ShardList.of([entry])))
    return folder


@pytest.mark.parametrize(
    "packed", [[-1], [500], [0, 50], [0, 0, 3], [0, -5, 3], [0, 50, 0], [0, 1, 2**31 - 1], [0, 250, 2]]
)
def test_keyframes_that_cannot_be_are_refused_before_memory_is_taken(packed):
    with pytest.raises(DatasetError, match="keyframes that a clip of 500 frames cannot have"):
        unpack_steps(np.array(packed, np.int32), 500)


@given(st.sets(st.integers(0, 3000)).map(sorted))
def test_steps_are_unpacked_as_they_were_packed(places):
    assert unpack_steps(pack_steps(places), 3001) == places


def test_a_forged_column_is_an_error_of_the_dataset(shards, processor, tmp_path):
    import pyarrow as pa

    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    index = copy / "shard-000000.index.parquet"
    table = read_table(index.read_bytes(), "index")
    values = table.column("keyframes").to_pylist()
    at = table.schema.get_field_index("keyframes")
    for forged in ([[0, 1, 2**31 - 1]], [[0], [0]], []):
        column = pa.array([forged, *values[1:]], type=table.schema.field(at).type)
        index.write_bytes(write_table(table.set_column(at, "keyframes", column)))
        with pytest.raises(DatasetError, match="vlm-stream index"):
            _build(_plan(_rewritten(copy), processor))
    assert isinstance(OpenDataset(str(shards), None, IndexCache()).draw(0, [0])[0].sizes.videos[0].keyframes, tuple)
