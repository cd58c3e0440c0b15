"""LeRobot v3 datasets are read where they are: episodes are seconds of MP4 files that hold many of them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from vlm_stream.build.builder import join_parts
from vlm_stream.cli import main
from vlm_stream.convert import verify_dataset
from vlm_stream.convert.in_place import open_dataset
from vlm_stream.convert.lerobot import _PLACE
from vlm_stream.convert.recount import recount
from vlm_stream.errors import ConfigError, NotFoundError, VlmStreamError
from vlm_stream.ledger import BadSample
from vlm_stream.media import decode_video
from vlm_stream.options import StreamOptions
from vlm_stream.plan import Ref
from vlm_stream.planning import open_plan
from vlm_stream.recipe import normalise_sources
from vlm_stream.storage import SpanReader, open_store
from vlm_stream.view import Viewer
from vlm_stream.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from vlm_stream.build import Delivery
    from vlm_stream.plan import Ref
from vlm_stream.planning import Plan

av = pytest.importorskip("av", reason="PyAV is not installed")
FPS = 10
CAMERAS = ("observation.images.top", "observation.images.wrist")
CODECS = {
    "libx264": {"g": "5", "bf": "2", "crf": "18", "threads": "1"},
    "libsvtav1": {"g": "2", "crf": "30", "preset": "12"},  # LeRobot's own choice
}
"""Of each camera."""
TASKS = ("Pick the cube.", "Open the drawer.")
LENGTHS = (30, 45, 25, 50)
"""Frames of each episode; the last one has a file of its own."""


def _write_video(path: Path, num_frames: int, seed: int, codec: str) -> None:
    """Write noise: a clip that is large enough for a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS, options=CODECS[codec])
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for _ in range(num_frames):
            picture = rng.integers(0, 256, (96, 128, 3), np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def write_lerobot(folder: Path) -> Path:
    """Write a dataset as LeRobot v3 lays it out, without the tables of states and actions, which nobody reads here."""
    video_path = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    features: dict[str, Any] = {
        camera: {"dtype": "video", "shape": [96, 128, 3], "names": ["height", "width", "channels"]}
        for camera in CAMERAS
    }
    features["action"] = {"dtype": "float32", "shape": [6], "names": None}
    info = {
        "codebase_version": "v3.0", "robot_type": "so101", "total_episodes": 4, "total_frames": sum(LENGTHS),
        "total_tasks": 2, "chunks_size": 1000, "data_files_size_in_mb": 100, "video_files_size_in_mb": 200, "fps": FPS,
        "splits": {"train": "0:4"}, "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": video_path, "features": features,
    }  # fmt: skip
    rows = []
    for number, length in enumerate(LENGTHS):
        begin, file = (sum(LENGTHS[:number]), 0) if number < 3 else (0, 1)
        row: dict[str, Any] = {"episode_index": number, "tasks": [TASKS[number % 2]], "length": length}
        row |= {"dataset_from_index": sum(LENGTHS[:number]), "dataset_to_index": sum(LENGTHS[: number + 1])}
        for camera in CAMERAS:
            place = {"chunk_index": 0, "file_index": file, "from_timestamp": begin / FPS,
                     "to_timestamp": (begin + length) / FPS}  # fmt: skip
            row |= {f"videos/{camera}/{name}": value for name, value in place.items()}
        rows.append(row)
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(info))
    pq.write_table(pa.Table.from_pylist(rows), folder / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0, 1], "task": TASKS}), folder / "meta/tasks.parquet")
    for seed, (camera, codec) in enumerate(zip(CAMERAS, CODECS, strict=True)):
        first, second = (folder / video_path.format(video_key=camera, chunk_index=0, file_index=n) for n in (0, 1))
        _write_video(first, sum(LENGTHS[:3]), seed, codec)
        _write_video(second, LENGTHS[3], 7 + seed, codec)
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lerobot(tmp_path_factory.mktemp("lerobot") / "robot")


def _plan(folder: Path, processor: Any, **options: Any) -> Plan:
    chosen = StreamOptions(**{"mode": "plain", "batch_size": 1, "max_frames": 4, "video_backend": "av"} | options)
    return open_plan(normalise_sources(str(folder)), chosen, processor)


def _build(plan: Plan) -> dict[tuple[str, str], Delivery]:
    with plan.build.open() as builder:
        blueprints = [planned.blueprint for planned in plan.blueprints(World(0, 1))]
        return {(each.rows[0][0].entry, each.rows[0][0].id or ""): builder.build(each) for each in blueprints}


def test_an_episode_of_a_camera_is_a_sample(dataset):
    before = {path for path in dataset.rglob("*") if path.is_file()}
    opened = open_dataset(str(dataset))
    drawn = [
        each for shard, count in enumerate(opened.samples_per_shard) for each in opened.draw(shard, list(range(count)))
    ]
    assert {(each.entry, each.id): each.sizes.videos[0].frames for each in drawn} == {
        (camera, f"episode-{number:06d}"): length for camera in CAMERAS for number, length in enumerate(LENGTHS)
    }
    written = {path for path in dataset.rglob("*") if path.is_file()} - before
    assert all(".vlm_stream" in path.parts for path in written)
    assert sum(path.stat().st_size for path in written) < 60_000  # no video among them
    url = str(dataset / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4")
    assert [each.shared[0].members[0][0] for each in drawn][:3] == [url] * 3
    assert set(opened.manifest.shards.entries) == set(CAMERAS)


def test_frames_are_those_of_the_file_from_a_part_of_its_bytes(dataset, processor):
    plan = _plan(dataset, processor)
    found, whole = _build(plan), _build(replace(plan, cutter=None))
    assert len(found) == 8
    assert not [bad for each in (*found.values(), *whole.values()) for bad in each.bad]
    for name, each in found.items():
        assert torch.equal(each.batch["pixel_values_videos"], whole[name].batch["pixel_values_videos"])
        assert torch.equal(each.batch["input_ids"], whole[name].batch["input_ids"])
        labels = each.batch["labels"][0]
        assert processor.tokenizer.decode(labels[labels >= 0]).startswith(TASKS[int(name[1][-1]) % 2])
    pieces = [planned.blueprint.rows[0][0] for planned in plan.blueprints(World(0, 1))]
    size = (dataset / f"videos/{CAMERAS[1]}/chunk-000/file-000.mp4").stat().st_size
    for piece in pieces:
        if piece.entry == CAMERAS[1] and piece.id != "episode-000003":
            assert sum(span.size for span in piece.reads) < 0.5 * size


def test_an_episode_holds_its_own_frames(dataset, processor):
    """Every frame of the second episode, against a decode of the whole file."""
    plan = _plan(dataset, processor, max_frames=1000, fps=100.0)
    blueprint = next(
        planned.blueprint
        for planned in plan.blueprints(World(0, 1))
        if planned.blueprint.rows[0][0].id == "episode-000001" and planned.blueprint.rows[0][0].entry == CAMERAS[0]
    )
    (piece,) = blueprint.rows[0]
    (clip,) = piece.clips
    ((start, end, first, frames),) = clip.spans
    assert (start, end, frames) == (3.0, 7.5, 45)
    assert first < 30  # counted from the groups of pictures that the episode needs
    data = (dataset / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4").read_bytes()
    frames = decode_video(data, lambda _: range(30, 75), "av").frames
    with SpanReader(plan.build.options.read()) as reader:
        members = join_parts(piece, iter(reader.begin(list(piece.reads)).results()))
    pictures = {}
    members[clip.name].decode(range(first, first + 45), pictures.__setitem__)
    assert np.array_equal(np.stack([pictures[number] for number in range(first, first + 45)]), frames)


def test_it_is_indexed_once_and_again_when_it_changes(dataset, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy, ignore=shutil.ignore_patterns(".vlm_stream"))
    first = open_dataset(str(copy)).root
    assert open_dataset(str(copy)).root == first
    table = copy / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(table).to_pylist()
    rows[0]["tasks"] = ["Wave."]
    pq.write_table(pa.Table.from_pylist(rows), table)
    assert open_dataset(str(copy)).root != first


def test_verify_and_recount_know_files_outside(dataset, processor, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy, ignore=shutil.ignore_patterns(".vlm_stream"))
    assert verify_dataset(str(copy), workers=1).problems == ()
    assert recount(str(copy), processor, workers=1).num_changed == 8
    video = copy / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4"
    status = video.stat()
    data = bytearray(video.read_bytes())
    data[len(data) // 2] ^= 255
    video.write_bytes(data)
    os.utime(video, ns=(status.st_atime_ns, status.st_mtime_ns))  # else it would be indexed again
    details = {each.detail for each in verify_dataset(str(copy), workers=1).problems}
    assert any("s on are not those of its table" in detail for detail in details)
    found = _build(_plan(copy, processor, max_frames=1000, fps=100.0))
    bad = [bad for each in found.values() for bad in each.bad]
    assert {(each.reason, each.entry) for each in bad} == {("crc_mismatch", CAMERAS[0])}


def test_a_bad_episode_is_a_bad_sample(dataset, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy, ignore=shutil.ignore_patterns(".vlm_stream"))
    table = copy / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(table).to_pylist()
    rows[0][f"videos/{CAMERAS[0]}/to_timestamp"] = 90.0
    rows[1]["tasks"] = []
    pq.write_table(pa.Table.from_pylist(rows), table)
    opened = open_dataset(str(copy))
    assert opened.manifest.totals.samples == 5
    lines = opened.store.get("ledger.jsonl").decode().splitlines()
    bad = {(each.source, each.sample): each for each in map(BadSample.from_json, lines)}
    assert bad[CAMERAS[0], "episode-000000"].reason == "bad_span"
    assert {each.reason for (_, name), each in bad.items() if name == "episode-000001"} == {"no_answer"}


def test_other_versions_and_broken_tables_are_refused(dataset, tmp_path):
    old = tmp_path / "old"
    (old / "meta").mkdir(parents=True)
    (old / "meta/info.json").write_text('{"codebase_version": "v2.1"}')
    with pytest.raises(ConfigError, match=r"dataset v2\.1, and v3 is read in place.*convert_dataset_v21_to_v30"):
        open_dataset(str(old))
    (old / "meta/info.json").write_text('{"codebase_version": "v3.0", "features": {}}')
    with pytest.raises(ConfigError, match=r"no episode of .* has a video"):
        open_dataset(str(old))
    copy = tmp_path / "copy"
    shutil.copytree(dataset / "meta", copy / "meta")
    (copy / "meta/episodes/chunk-000/file-000.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="is no table of episodes of LeRobot v3"):
        open_dataset(str(copy))
    copy = tmp_path / "lost"
    shutil.copytree(dataset, copy, ignore=shutil.ignore_patterns(".vlm_stream", "file-001.mp4"))
    with pytest.raises(NotFoundError, match=r"file-001\.mp4"):
        open_dataset(str(copy))


def _forged(dataset: Path, folder: Path, rows: dict[str, Any] | None = None, **info: Any) -> str:
    """Copy what describes a dataset, with other values."""
    shutil.copytree(dataset / "meta", folder / "meta")
    known = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps(known | info))
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    if rows is not None:
        table = pq.read_table(path)
        for name, values in rows.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        pq.write_table(table, path, compression="zstd")
    return str(folder)


@pytest.mark.parametrize(
    ("info", "sentence"),
    [
        ({"video_path": "{chunk_index:03000000000d}.mp4"}, "is no table of episodes"),
        ({"video_path": "{video_key:>3000000000}.mp4"}, "is no table of episodes"),
        ({"video_path": "{video_key.__class__}.mp4"}, "is no table of episodes"),
        ({"video_path": "{chunk_index!r}.mp4"}, "is no table of episodes"),
        ({"video_path": "a\x00b.mp4"}, "is no table of episodes"),
        ({"video_path": 7}, "is no table of episodes"),
        ({"video_path": "../../{video_key}.mp4"}, "is not a path under"),
        ({"video_path": "/etc/passwd"}, "is not a path under"),
        ({"features": 7}, "has a video, so there is nothing"),
        ({"features": {"a": 7, "b": {"dtype": []}}}, "has a video, so there is nothing"),
    ],
)
def test_a_forged_description_is_refused(dataset, tmp_path, info, sentence):
    with pytest.raises(VlmStreamError, match=sentence):
        open_dataset(_forged(dataset, tmp_path / "robot", **info))


def test_a_description_that_is_nested_without_end_is_none(tmp_path):
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/info.json").write_text("[" * 100_000)
    with pytest.raises(VlmStreamError, match=r"dataset\.json"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("episode_index", ["a", "b", "c", "d"]),
        (f"videos/{CAMERAS[0]}/chunk_index", [0.5] * 4),
        (f"videos/{CAMERAS[0]}/from_timestamp", ["now"] * 4),
        ("tasks", [["a"], [None], ["b"], ["c"]]),
        ("tasks", [1, 2, 3, 4]),
    ],
)
def test_tables_of_episodes_hold_numbers_and_texts(dataset, tmp_path, name, values):
    with pytest.raises(ConfigError, match="is no table of episodes"):
        open_dataset(_forged(dataset, tmp_path / "robot", {name: values}))


def test_a_table_of_episodes_that_is_large_in_memory_is_refused_before_it_is(dataset, tmp_path):
    url = _forged(dataset, tmp_path / "robot")
    columns = {f"videos/{camera}/{name}": np.zeros(1_000_000) for camera in CAMERAS for name in _PLACE}
    columns |= {"episode_index": np.zeros(1_000_000, np.int64)}
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int32)), pa.array(["x" * 1_000_000]))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(1_000_001, dtype=np.int32)), text)
    path = tmp_path / "robot/meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pa.table(columns | {"tasks": lists}), path, compression="zstd")
    assert path.stat().st_size < 1 << 20
    before = pa.total_allocated_bytes()
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    kept = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(ConfigError, match="bytes would take"):
            open_dataset(url)
    finally:
        pa.set_memory_pool(kept)
    assert pool.max_memory() < 256 << 20
    assert pa.total_allocated_bytes() <= before + (64 << 20)


def test_from_a_store(dataset, processor, s3_server):
    store = open_store(s3_server.url("robot"), s3_server.options)
    for path in dataset.rglob("*"):
        if path.is_file() and ".vlm_stream" not in path.parts:
            store.put(path.relative_to(dataset).as_posix(), path)
    found = _build(_plan(s3_server.url("robot"), processor, store=s3_server.options))
    local = _build(_plan(dataset, processor))
    assert found.keys() == local.keys()
    for name, each in found.items():
        assert not each.bad
        assert torch.equal(each.batch["pixel_values_videos"], local[name].batch["pixel_values_videos"])


def test_the_viewer_and_the_index_command_know_it(dataset, processor, capsys):
    assert main(["index", str(dataset)]) == 0
    assert "8" in capsys.readouterr().out
    viewer = Viewer(normalise_sources(str(dataset)), StreamOptions(mode="plain", max_frames=4), processor)
    try:
        ((shard, row),) = viewer.catalog.datasets.opened[0].find("episode-000003")[:1]
        (medium,) = viewer.samples.read(Ref(0, shard, row)).media
        assert "50 frames" in medium.says
        assert len(viewer.frames_of(Ref(0, shard, row), 0)) == 4
    finally:
        viewer.close()


def test_clips_without_a_table_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "libx264", CODECS["libx264"] | {"g": "500", "sc_threshold": "0"})
    manifest = open_dataset(str(write_lerobot(tmp_path / "robot"))).manifest
    assert manifest.whole == {"it is one group of pictures": 4}
