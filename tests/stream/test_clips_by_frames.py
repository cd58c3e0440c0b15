"""Long clips are fetched and decoded by frames: the batches of whole files, from a part of their bytes."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import tarfile
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.storage.web_server import WebServer
from vlm_stream import StreamLoader
from vlm_stream.cli import main
from vlm_stream.clips import decode_sample
from vlm_stream.convert import IndexOptions, index_tars, make_shards, verify_dataset
from vlm_stream.convert.clip_tables import ClipTables, _compare, check_table, find_clips
from vlm_stream.convert.recount import recount
from vlm_stream.format import IndexCache, OpenDataset
from vlm_stream.options import StreamOptions
from vlm_stream.plan import Ref
from vlm_stream.planning import Plan, open_plan
from vlm_stream.recipe import normalise_sources
from vlm_stream.storage import StoreOptions, open_store, plan_requests
from vlm_stream.testing import make_jpeg, make_mp4
from vlm_stream.tokens import MediaSizes, VideoSize, count_decoded
from vlm_stream.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from vlm_stream.blueprint import Blueprint, Piece
    from vlm_stream.build import Delivery

NOISE = "-f lavfi -i testsrc2=size=96x64:rate=25:duration=20,noise=alls=30:allf=t:all_seed=1"
X264 = "-c:v libx264 -preset veryfast -g 25 -sc_threshold 0 -crf 12 -pix_fmt yuv420p"
CLIPS = {
    "plain.mp4": f"{X264} -bf 2",
    "sound.mkv": f"-f lavfi -i sine=duration=20 {X264} -c:a aac",
    "open.mp4": f"{X264} -bf 3 -x264-params open-gop=1",
    "deep.mp4": f"{X264} -pix_fmt yuv420p10le",
}


def _ask(item: dict[str, Any] | list[dict[str, Any]], own_id: str) -> dict[str, Any]:
    items = item if isinstance(item, list) else [item]
    return {
        "id": own_id,
        "conversation": [
            {"role": "user", "content": [*items, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A clip."}]},
        ],
    }


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight conversations; six show clips of some megabytes."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    folder = tmp_path_factory.mktemp("clips")
    for name, arguments in CLIPS.items():
        command = f"ffmpeg -loglevel error -nostdin {NOISE} {arguments} {folder / name}"
        subprocess.run(command.split(), check=True, timeout=60)
    (folder / "small.mp4").write_bytes(make_mp4(num_frames=40, gop=5))
    (folder / "a.jpg").write_bytes(make_jpeg(64, 96))
    video = {name: {"type": "video", "video": name} for name in (*CLIPS, "small.mp4")}
    image = {"type": "image", "image": "a.jpg"}
    lines = [_ask(item, name) for name, item in video.items()]
    lines += [
        _ask({**video["plain.mp4"], "frame_indices": [3, 260, 260, 41, 9999]}, "named"),
        _ask([video["plain.mp4"], image, video["sound.mkv"]], "two"),
        _ask([video["plain.mp4"], {**video["plain.mp4"], "frame_indices": [100, 101]}], "twice"),
    ]
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def shards(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    make_shards(records, folder, samples_per_shard=3, media_dir=str(records.parent), workers=1)
    return folder


def _plan(folder: Path, processor: Any, **options: Any) -> Plan:
    chosen = StreamOptions(**{"mode": "plain", "batch_size": 1, "max_frames": 4, "with_refs": True} | options)
    return open_plan(normalise_sources(str(folder)), chosen, processor)


def _build(plan: Plan) -> list[Delivery]:
    with plan.build.open() as builder:
        return [builder.build(planned.blueprint) for planned in plan.blueprints(World(0, 1))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return (
        one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        if isinstance(one, dict)
        else one == other
    )


@pytest.mark.parametrize("backend", ["auto", "av"])
def test_batches_are_those_of_whole_files_from_a_part_of_the_bytes(shards, processor, backend):
    plan = _plan(shards, processor, video_backend=backend)
    by_frames, whole = _build(plan), _build(replace(plan, cutter=None))
    assert [each.name for each in by_frames] == [each.name for each in whole]
    assert not any(each.bad for each in (*by_frames, *whole))
    assert len(by_frames) == 8
    assert all(_same(one.batch, other.batch) for one, other in zip(by_frames, whole, strict=True))
    assert by_frames[-1].reads.bytes_read < whole[-1].reads.bytes_read * 0.4


@pytest.fixture(scope="module")
def odd_shards(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One clip of which a hundred neighbours are named, and one beside a clip that is read whole."""
    video = {name: {"type": "video", "video": name} for name in (*CLIPS, "small.mp4")}
    near = {**video["plain.mp4"], "frame_indices": list(range(250, 350))}
    lines = [_ask(near, "near"), _ask([video["small.mp4"], video["plain.mp4"]], "mixed")]
    folder = tmp_path_factory.mktemp("odd")
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_shards(folder / "records.jsonl", folder / "out", media_dir=str(records.parent), workers=1)
    return folder / "out"


def test_named_neighbours_are_cut_and_videos_beside_a_cut_clip_still_cost(odd_shards, processor):
    plan = _plan(odd_shards, processor, video_backend="av")
    found = {
        piece.id: (planned.blueprint.work, piece)
        for planned in plan.blueprints(World(0, 1))
        for piece in planned.blueprint.rows[0]
    }
    work, near = found["near"]
    assert work.num_bytes < near.span.size / 2
    assert 100 <= near.clips[0].cut.num_packets < 130
    work, mixed = found["mixed"]
    (clip,) = mixed.clips
    assert clip.videos == (1,)
    small = mixed.sizes.videos[0]
    assert work.video_pixels == clip.cut.num_packets * 96 * 64 + small.frames * small.height * small.width
    by_frames, whole = _build(plan), _build(replace(plan, cutter=None))
    assert all(_same(one.batch, other.batch) for one, other in zip(by_frames, whole, strict=True))


def test_headers_and_padding_around_clips_are_not_read(shards, processor):
    plan = _plan(shards, processor, video_backend="av")
    pieces = [piece for planned in plan.blueprints(World(0, 1)) for piece in planned.blueprint.rows[0]]
    cut = [piece for piece in pieces if piece.clips]
    assert len(cut) == 7
    assert all(part.members for piece in cut for part in piece.parts)
    assert all({member for part in piece.parts for member, *_ in part.members} >= {"json"} for piece in cut)


def test_a_clip_whose_rate_the_index_says_otherwise_gets_no_table(records):
    content = (records.parent / "plain.mp4").read_bytes()
    conversation = [{"role": "user", "content": [{"type": "video", "video": "0.mp4"}]}]
    size = VideoSize(frames=500, height=64, width=96, fps=25.0, seconds=20.0)
    found, other = (
        find_clips(conversation, {"0.mp4": content}, MediaSizes(videos=(each,)), ClipTables())
        for each in (size, replace(size, fps=24.0))
    )
    assert list(found.clips) == ["0.mp4"]
    assert other is None


def test_decord_and_torchcodec_read_whole_files(shards, processor):
    for backend in ("decord", "torchcodec"):
        assert _plan(shards, processor, video_backend=backend).cutter is None


def test_dense_picks_read_whole_clips_and_no_table(shards, processor, monkeypatch):
    plan = _plan(shards, processor, max_frames=40, video_backend="av")
    monkeypatch.setattr(OpenDataset, "_table", None)  # would fail
    drawn = [ref for row in range(3) for ref in plan.datasets.opened[0].draw(0, [row])]
    assert all(each.table is None or not plan.cutter.may_cut(each) for each in drawn)


def test_a_missing_file_of_tables_is_said_once_and_costs_bytes_alone(shards, processor, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    (copy / "shard-000000.clips.bin").unlink()
    plan = _plan(copy, processor, video_backend="av")
    found = _build(plan)
    whole = _build(replace(plan, cutter=None))
    assert all(_same(one.batch, other.batch) for one, other in zip(found, whole, strict=True))
    told = [record.message for record in caplog.records if "clips.bin" in record.message]
    assert len(told) == 1
    assert "so clips of its shard are read whole; copy it here, or write it again" in told[0]


def test_a_store_that_lets_nobody_list_forbids_what_is_missing(shards, caplog):
    files = {path.name: path.read_bytes() for path in shards.iterdir() if path.name != "shard-000000.clips.bin"}
    with WebServer(files, missing=403) as server:
        dataset = OpenDataset(server.url, StoreOptions(allow_http=True), IndexCache())
        place = dataset.draw(0, [0])[0].table
        assert dataset.tables([place])[0].result() is None
    assert "so clips of its shard are read whole" in caplog.text


def _tables(folder: Path) -> dict[str, Any]:
    dataset = OpenDataset(str(folder), None, IndexCache())
    found = {}
    for index in dataset.indexes():
        for row in range(len(index)):
            if (place := index.table(row)) is not None:
                found[index.own_id(row) or index.key(row)] = (
                    index,
                    row,
                    decode_sample(dataset.tables([place])[0].result()),
                )
    return found


def _damage(folder: Path, own_id: str, gop: int) -> None:
    index, row, tables = _tables(folder)[own_id]
    begin, _ = tables.clips["0.mp4"].gop_range(gop)
    member = next(member for member in index.members(row) if member.name == "0.mp4")
    with (folder / index.path).open("r+b") as file:
        file.seek(member.offset + begin + 50)
        file.write(b"damaged")


def test_a_damaged_gop_is_a_bad_sample_with_its_time_and_others_do_not_notice(shards, processor, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    _damage(copy, "plain.mp4", 0)
    bad = [bad for each in _build(_plan(copy, processor, video_backend="av")) for bad in each.bad]
    assert [(each.id, each.stage, each.reason) for each in bad] == [("plain.mp4", "read", "crc_mismatch")]
    assert "0.mp4 from 0.00 s on: bytes " in bad[0].detail
    shutil.copy(shards / "shard-000000.tar", copy)
    _damage(copy, "plain.mp4", 1)  # none of its frames is picked
    assert not [bad for each in _build(_plan(copy, processor, video_backend="av")) for bad in each.bad]


@pytest.mark.parametrize(
    ("change", "fact"),
    [({"name": "none"}, "PyAV cannot decode none here"), ({"width": 98}, "the clip begins with 98x64")],
)
def test_what_this_builder_cannot_decode_by_frames_is_read_whole(shards, processor, caplog, change, fact):
    plan = _plan(shards, processor, video_backend="av")
    blueprints = [planned.blueprint for planned in plan.blueprints(World(0, 1))]
    whole = _build(replace(plan, cutter=None))
    with plan.build.open() as builder:
        found = [builder.build(_with_codec(blueprint, change)) for blueprint in blueprints]
    assert all(_same(one.batch, other.batch) for one, other in zip(found, whole, strict=True))
    assert found[-1].reads.samples == whole[-1].reads.samples
    (told,) = [record.message for record in caplog.records if "cannot be decoded from the ranges" in record.message]
    assert fact in told
    assert "so its sample is read once more and whole" in told


def _with_codec(blueprint: Blueprint, change: dict[str, Any]) -> Blueprint:
    """Return a blueprint whose clips are coded in another way than the files."""

    def changed(piece: Piece) -> Piece:
        cuts = (replace(clip.cut, codec=clip.cut.codec._replace(**change)) for clip in piece.clips)
        return piece._replace(clips=tuple(clip._replace(cut=cut) for clip, cut in zip(piece.clips, cuts, strict=True)))

    return replace(blueprint, rows=tuple(tuple(map(changed, row)) for row in blueprint.rows))


def test_tars_of_others_get_the_same_tables(records, processor, tmp_path):
    names = [*CLIPS, "small.mp4"]
    with tarfile.open(tmp_path / "others.tar", "w") as tar:
        for number, name in enumerate(names):
            chat = tmp_path / "chat.json"
            text = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]
            text.append({"role": "assistant", "content": [{"type": "text", "text": "Yes."}]})
            chat.write_text(
                json.dumps(
                    {
                        "conversation": [
                            {
                                **m,
                                "content": [
                                    {**item, "video": name.rpartition(".")[2]} if item["type"] == "video" else item
                                    for item in m["content"]
                                ],
                            }
                            for m in text
                        ]
                    }
                )
            )
            tar.add(chat, f"{number:03d}.json")
            tar.add(records.parent / name, f"{number:03d}.{name.rpartition('.')[2]}")
    index_tars([str(tmp_path / "others.tar")], IndexOptions(workers=1))
    assert len(_tables(tmp_path)) == len(CLIPS)
    plan = _plan(tmp_path, processor, video_backend="av")
    by_frames, whole = _build(plan), _build(replace(plan, cutter=None))
    assert all(_same(one.batch, other.batch) for one, other in zip(by_frames, whole, strict=True))
    assert by_frames[-1].reads.bytes_read < whole[-1].reads.bytes_read * 0.4


def test_a_recount_keeps_the_tables(shards, processor, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    before = {name: table for name, (_, _, table) in _tables(copy).items()}
    recount(str(copy), processor, workers=1)
    after = {name: table for name, (_, _, table) in _tables(copy).items()}
    assert before.keys() == after.keys()
    assert {"plain.mp4", "sound.mkv", "open.mp4", "deep.mp4", "named", "two", "twice"} == set(after)


def test_verify_checks_tables_against_the_files(shards, tmp_path):
    assert verify_dataset(str(shards), workers=1).problems == ()
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    tables = copy / "shard-000000.clips.bin"
    data = bytearray(tables.read_bytes())
    data[len(data) // 2] ^= 1
    tables.write_bytes(data)
    (copy / "shard-000001.clips.bin").unlink()
    shutil.copy(copy / "shard-000000.clips.bin", copy / "shard-000002.clips.bin")
    found = [(each.shard, each.kind, each.detail) for each in verify_dataset(str(copy), workers=1).problems]
    assert {kind for _, kind, _ in found} == {"wrong_tables"}
    first, second, *third = [detail for _, _, detail in sorted(found)]
    assert "the tables of its clips are damaged" in first
    assert second == "there is no shard-000001.clips.bin, so the clips of this shard are read whole."
    assert any("its index says" in detail for detail in third)


def test_tables_of_another_file_are_found(shards):
    index, row, _ = _tables(shards)["plain.mp4"]
    other, _, _ = _tables(shards)["open.mp4"]
    span = index.span(row)
    data = (shards / index.path).read_bytes()[span.offset : span.offset + span.size]
    tables = (shards / "shard-000000.clips.bin").read_bytes()
    assert list(check_table(index, row, tables, data)) == []
    assert other.path == index.path
    member = next(member for member in index.members(row) if member.name == "0.mp4")
    begin = member.offset - span.offset + _tables(shards)["plain.mp4"][2].clips["0.mp4"].gop_range(7)[0]
    damaged = data[:begin] + bytes(20) + data[begin + 20 :]
    assert list(check_table(index, row, tables, damaged)) == [
        "the pictures of 0.mp4 from 7.00 s on are not those of its table."
    ]
    sample = _tables(shards)["plain.mp4"][2]
    clip = sample.clips["0.mp4"]
    changes = ({"rate": (24, 1)}, {"is_plain": False}, {"codec": clip.codec._replace(turns=1)}, {"start": 7})
    for change in changes:
        told = list(_compare("0.mp4", replace(sample, clips={"0.mp4": replace(clip, **change)}), clip))
        assert told == [f"the table of 0.mp4 is not that of the file: it has another {next(iter(change))}."]
    other = replace(clip, crc32c=clip.crc32c + (np.arange(clip.num_gops) > 2))
    told = list(_compare("0.mp4", replace(sample, clips={"0.mp4": other}), clip))
    assert told == ["the pictures of 0.mp4 from 3.00 s on are not those of its table."]
    assert list(check_table(index, row, tables, b"x" + data[1:])) == [
        "the checksums of what lies around its clips are not those of the tar."
    ]


def test_what_decoding_costs_is_planned_and_reported(shards, processor, saved_processor, capsys):
    plan = _plan(shards, processor, video_backend="av")
    media = plan.datasets.opened[0].media(range(3))
    decoded = count_decoded(media, plan.build.frames)
    small = media.video_sizes[4]
    assert decoded[4] == round(int(small.prod()) / 1000)  # it has no table
    num_gops = _tables(shards)["plain.mp4"][2].clips["0.mp4"].num_gops
    assert decoded[0] == round(4 * (500 / num_gops + 1) / 2 * 96 * 64 / 1000)
    works = [each.blueprint.work for each in plan.blueprints(World(0, 1))]
    whole = [each.blueprint.work for each in replace(plan, cutter=None).blueprints(World(0, 1))]
    assert sum(work.video_pixels for work in works) < sum(work.video_pixels for work in whole) / 4
    assert sum(work.num_bytes for work in works) < sum(work.num_bytes for work in whole) / 2
    arguments = ["plan", str(shards), "--processor", str(saved_processor), "--world", "2", "--json", "--mode", "plain"]
    arguments += ["--set", "max_frames=4", "--set"]
    assert main([*arguments, "video_backend=av"]) == 0
    by_frames = json.loads(capsys.readouterr().out)
    assert main([*arguments, "video_backend=decord"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert by_frames["bytes_per_step"] < told["bytes_per_step"] / 2
    assert by_frames["decode_imbalance_step"] >= 1
    pieces = plan.pieces([Ref(0, shard, row) for shard, rows in enumerate((3, 3, 2)) for row in range(rows)])
    requests = sum(len(plan_requests(piece.reads, plan.build.options.read())) for piece in pieces)
    assert by_frames["requests_per_sample"] * 8 == requests + 7  # and a table of each but one


def test_from_a_store_each_group_of_pictures_is_a_request(shards, processor, s3_server):
    store = open_store(s3_server.url("clips"), s3_server.options)
    for path in shards.iterdir():
        if path.is_file():
            store.put(path.name, path)
    plan = _plan(s3_server.url("clips"), processor, video_backend="av", max_frames=2, store=s3_server.options)
    by_frames, whole = _build(plan), _build(replace(plan, cutter=None))
    assert all(_same(one.batch, other.batch) for one, other in zip(by_frames, whole, strict=True))
    assert by_frames[-1].reads.bytes_read < whole[-1].reads.bytes_read * 0.4
    assert by_frames[-1].reads.samples == whole[-1].reads.samples == 8
    spans = [list(each.blueprint.rows[0][0].reads) for each in plan.blueprints(World(0, 1))]
    planned = sum(len(plan_requests(each, plan.build.options.read())) for each in spans)
    assert by_frames[-1].reads.requests == planned


def test_tables_of_later_batches_are_asked_for_while_one_is_waited_for(shards, processor, monkeypatch):
    plan = _plan(shards, processor)
    expected = [each.blueprint for each in plan.blueprints(World(0, 1))]
    asked, read, look = [], OpenDataset._table, Plan._look
    third_was_asked_for = threading.Event()

    def wait(self: OpenDataset, place: Any) -> bytes | None:
        asked.append(place)
        if len(asked) == 3:
            third_was_asked_for.set()
        assert third_was_asked_for.wait(30)
        return read(self, place)

    monkeypatch.setattr(OpenDataset, "_table", wait)
    assert [each.blueprint for each in plan.blueprints(World(0, 1))] == expected
    looked = []
    monkeypatch.setattr(Plan, "_look", lambda self, *args: looked.append(args) or look(self, *args))
    next(replace(plan, cutter=None).blueprints(World(0, 1)))
    assert len(looked) == 1  # without tables there is nothing to wait for


def test_blueprints_travel_to_workers(shards, processor):
    options = {"mode": "plain", "batch_size": 1, "max_frames": 4, "processor": processor}
    with StreamLoader(str(shards), num_workers=1, decode_threads=3, **options) as loader:
        batches = list(loader)
    with StreamLoader(str(shards), num_workers=0, video_backend="decord", **options) as loader:
        alike = [_same(one, other) for one, other in zip(batches, loader, strict=True)]
    assert alike.count(False) == 1  # ten bits, of which libraries make other colours
    blueprint = max((each.blueprint for each in _plan(shards, processor).blueprints(World(0, 1))), key=_size)
    assert pickle.loads(pickle.dumps(blueprint)) == blueprint
    assert _size(blueprint) < 8000


def _size(blueprint: Blueprint) -> int:
    return len(pickle.dumps(blueprint))
