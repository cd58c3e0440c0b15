"""Samples that show some seconds of a file: what is counted, picked, fetched, decoded and shown is those seconds."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch

from vlm_stream import StreamLoader
from vlm_stream.clips import ClipTable, decode_sample, packets
from vlm_stream.convert import IndexOptions, clip_tables, index_tars, make_shards, media_bytes, verify_dataset
from vlm_stream.convert.clip_tables import _compare, check_table
from vlm_stream.convert.recount import recount
from vlm_stream.convert.sample import build_sample
from vlm_stream.encode import EncodeConfig, Encoder
from vlm_stream.errors import BadSampleError
from vlm_stream.format import IndexCache, OpenDataset
from vlm_stream.ledger import BadSample
from vlm_stream.mapstyle import RobustDatasetWrapper
from vlm_stream.options import StreamOptions
from vlm_stream.plan import Ref
from vlm_stream.planning import open_plan
from vlm_stream.recipe import normalise_sources
from vlm_stream.sources import Record
from vlm_stream.testing import make_mp4
from vlm_stream.view import Viewer
from vlm_stream.view.routes import PICTURES
from vlm_stream.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from vlm_stream.build import Delivery
    from vlm_stream.format import Drawn
    from vlm_stream.plan import Ref
from vlm_stream.planning import Plan

pytest.importorskip("av", reason="PyAV is not installed")
NOISE = "-f lavfi -i testsrc2=size=96x64:rate=25:duration=20,noise=alls=30:allf=t:all_seed=1"
X264 = "-c:v libx264 -preset veryfast -g 25 -sc_threshold 0 -crf 12 -pix_fmt yuv420p"
CLIPS = {
    "plain.mp4": f"{X264} -bf 2",
    "open.mkv": f"{X264} -bf 3 -x264-params open-gop=1",
    "vary.mp4": f"-vf select='not(mod(n\\,3))+gt(n\\,200)' -fps_mode vfr {X264}",
}


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of some megabytes, a small one, and a sound."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    folder = tmp_path_factory.mktemp("media")
    for name, arguments in CLIPS.items():
        words = [word.replace("'", "") for word in f"{NOISE} {arguments}".split()]
        command = ["ffmpeg", "-loglevel", "error", "-nostdin", *words, str(folder / name)]
        subprocess.run(command, check=True, timeout=60)
    (folder / "small.mp4").write_bytes(make_mp4(num_frames=40, gop=5, fps=10.0))
    soundfile.write(folder / "a.wav", np.sin(np.arange(16000 * 4) / 30).astype(np.float32), 16000)
    return folder


def _ask(own_id: str, *items: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": own_id,
        "messages": [
            {"role": "user", "content": [*items, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A clip."}]},
        ],
    }


def _clip(name: str, **extras: Any) -> dict[str, Any]:
    return {"type": "video", "video": name, **extras}


def _convert(records: list[dict[str, Any]], media: Path, folder: Path, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    make_shards(path, folder / "out", media_dir=str(media), workers=1, **options)
    return folder / "out"


SPANS = {
    "closed": ("plain.mp4", {"start": 8.0, "end": 12.0}, range(200, 300)),
    "odd": ("plain.mp4", {"start": 8.01, "end": 8.5}, range(201, 213)),
    "tail": ("plain.mp4", {"start": 19.5}, range(488, 500)),
    "open": ("open.mkv", {"start": 7.52, "end": 11.0}, range(188, 275)),
    "vary": ("vary.mp4", {"start": 4.0, "end": 9.0}, None),
    "small": ("small.mp4", {"start": 1.0, "end": 3.0}, range(10, 30)),
}


@pytest.fixture(scope="module")
def shards(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [_ask(own_id, _clip(name, **span)) for own_id, (name, span, _) in SPANS.items()]
    lines += [
        _ask("named", _clip("plain.mp4", start=8.0, end=12.0, frame_indices=[0, 7, 99, 500])),
        _ask("twice", _clip("plain.mp4", start=2, end=4), _clip("plain.mp4", start=14, end=15), _clip("plain.mp4")),
    ]
    return _convert(lines, media, tmp_path_factory.mktemp("shards"), samples_per_shard=4)


def _plan(folder: Path, processor: Any, **options: Any) -> Plan:
    chosen = StreamOptions(**{"mode": "plain", "batch_size": 1, "max_frames": 4, "with_refs": True} | options)
    return open_plan(normalise_sources(str(folder)), chosen, processor)


def _build(plan: Plan) -> dict[str, Delivery]:
    with plan.build.open() as builder:
        made = {
            planned.blueprint.rows[0][0].id: builder.build(planned.blueprint)
            for planned in plan.blueprints(World(0, 1))
        }
    assert not [bad for each in made.values() for bad in each.bad]
    return made


def _drawn(folder: Path) -> dict[str, Drawn]:
    dataset = OpenDataset(str(folder), None, IndexCache())
    found = [
        each
        for shard, samples in enumerate(dataset.samples_per_shard)
        for each in dataset.draw(shard, list(range(samples)))
    ]
    return {each.id or each.key: each for each in found}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = [key for key, value in one.items() if isinstance(value, torch.Tensor)]
    return bool(keys) and all(torch.equal(one[key], other[key]) for key in keys)


def test_the_index_counts_the_frames_of_the_seconds(shards):
    drawn = _drawn(shards)
    for own_id, (_, _, frames) in SPANS.items():
        (video,) = drawn[own_id].sizes.videos
        if frames is not None:
            assert video.frames == len(frames), own_id
            assert video.seconds == pytest.approx(len(frames) / video.fps)
    assert [video.frames for video in drawn["twice"].sizes.videos] == [50, 25, 500]
    assert drawn["closed"].table.gops == (-4,)
    assert drawn["small"].table is None
    assert drawn["twice"].table.gops == (-2, -1, 20)


@pytest.mark.parametrize("backend", ["auto", "av", "decord"])
def test_frames_are_those_of_the_whole_file(shards, media, processor, tmp_path, backend):
    """By frames, from the whole file, and named one by one in a sample of the whole file: the same pixels."""
    spans = {own_id: each for own_id, each in SPANS.items() if each[2] is not None}
    plain = []
    for own_id, (name, _, frames) in spans.items():
        picked = np.rint(np.linspace(frames[0], frames[-1], 4)).astype(int).tolist()
        plain.append(_ask(own_id, _clip(name, frame_indices=picked)))
    plain.append(_ask("named", _clip("plain.mp4", frame_indices=[200, 207, 299, 299])))
    others = _build(_plan(_convert(plain, media, tmp_path), processor, video_backend=backend))
    plan = _plan(shards, processor, video_backend=backend)
    found, whole = _build(plan), _build(replace(plan, cutter=None))
    assert found.keys() == whole.keys()
    assert all(_same(found[own_id].batch, whole[own_id].batch) for own_id in found)
    for own_id, other in others.items():
        for key in ("pixel_values_videos", "video_grid_thw"):
            assert torch.equal(found[own_id].batch[key], other.batch[key]), own_id


def test_only_the_bytes_of_the_seconds_are_fetched(shards, media, processor):
    plan = _plan(shards, processor, video_backend="av", max_frames=60)
    pieces = {each.blueprint.rows[0][0].id: each.blueprint.rows[0][0] for each in plan.blueprints(World(0, 1))}
    for own_id in ("closed", "odd", "tail", "open", "vary"):  # although every group of pictures in them is wanted
        whole = (media / SPANS[own_id][0]).stat().st_size
        assert sum(span.size for span in pieces[own_id].reads) < 0.4 * whole, own_id
    assert not pieces["small"].parts


def test_text_alone_is_counted_and_encoded_from_the_index(shards, processor):
    with_pixels = _build(_plan(shards, processor))
    without = _build(_plan(shards, processor, pixels=False))
    for own_id, each in without.items():
        assert torch.equal(each.batch["input_ids"], with_pixels[own_id].batch["input_ids"])


def test_verify_and_recount_know_parts_of_files(shards, processor, tmp_path):
    assert verify_dataset(str(shards), workers=1).problems == ()
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    recount(str(copy), processor, workers=1)
    assert {own_id: each.table for own_id, each in _drawn(copy).items()} == {
        own_id: each.table for own_id, each in _drawn(shards).items()
    }
    dataset = OpenDataset(str(shards), None, IndexCache())
    drawn = _drawn(shards)
    tables = dataset.tables([drawn["closed"].table])[0].result()
    assert decode_sample(tables).items[0].span == (8.0, 12.0, 0, 100)


def test_a_file_is_stored_once_in_a_shard(shards, media):
    drawn = _drawn(shards)
    names = [f"{number:09d}" for number in range(4)]
    with tarfile.open(shards / "shard-000000.tar") as tar:
        stored = {member.name: member for member in tar.getmembers()}
        assert list(stored) == [f"{names[0]}.json", f"{names[0]}.0.mp4", *(f"{n}.json" for n in names[1:3]),
                                f"{names[3]}.json", f"{names[3]}.0.mkv"]  # fmt: skip
        told = json.load(tar.extractfile(f"{names[1]}.json"))
    assert told["shared"] == {"0.mp4": "000000000.0.mp4"}
    assert told["conversation"][0]["content"][0] == {"type": "video", "video": "0.mp4", "start": 8.01, "end": 8.5}
    assert drawn["odd"].members[1] == drawn["closed"].members[1]
    (owner,) = drawn["odd"].shared
    assert owner[:5] == drawn["closed"].span[:5]
    assert drawn["odd"].num_bytes > (media / "plain.mp4").stat().st_size > 100 * drawn["odd"].span.size
    assert drawn["named"].shared == ()  # in the next shard: the file is there again


def test_samples_that_share_a_file_are_handed_out_whole(shards, media):
    with StreamLoader(str(shards), processor=None, mode="plain", batch_size=1, num_workers=0) as loader:
        samples = {sample.id: sample for batch in loader for sample in batch["samples"]}
    content = (media / "plain.mp4").read_bytes()
    for own_id in ("closed", "odd", "tail", "twice"):
        assert bytes(samples[own_id].members["0.mp4"]) == content
    assert samples["odd"].conversation()[0]["content"][0]["video"] == content


def test_a_damaged_file_is_a_bad_sample_of_each_that_shows_it(shards, processor, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    drawn = _drawn(copy)
    table = decode_sample(OpenDataset(str(copy), None, IndexCache()).tables([drawn["odd"].table])[0].result()).clips[
        "0.mp4"
    ]
    _, offset, _ = drawn["odd"].members[1]
    with (copy / "shard-000000.tar").open("r+b") as file:
        file.seek(offset + table.gop_range(0)[0] + 50)
        file.write(b"damaged")
    plan = _plan(copy, processor, video_backend="av")
    with plan.build.open() as builder:
        by_frames, by_files = (each.blueprints(World(0, 1)) for each in (plan, replace(plan, cutter=None)))
        bad = [bad for each in by_frames for bad in builder.build(each.blueprint).bad]
        whole = [bad for each in by_files for bad in builder.build(each.blueprint).bad]
    assert {each.id for each in bad} == {"closed", "odd"}
    assert all("0.mp4 from 8.00 s on" in each.detail for each in bad)
    assert {each.id for each in whole} == {"closed", "odd", "tail"}
    assert {each.reason for each in (*bad, *whole)} == {"crc_mismatch"}
    kinds = [(each.key, each.kind) for each in verify_dataset(str(copy), workers=1).problems]
    assert ("000000000", "crc_mismatch") in kinds


def test_tables_of_samples_that_share_a_file_are_checked(shards, tmp_path):
    dataset = OpenDataset(str(shards), None, IndexCache())
    index = next(dataset.indexes())
    tables = (shards / "shard-000000.clips.bin").read_bytes()
    content = (shards / index.path).read_bytes()
    data = [content[span.offset : span.offset + span.size] for span in map(index.span, range(2))]
    checked: dict[int, bytes] = {}
    assert list(check_table(index, 0, tables, data[0], checked)) == []
    assert list(check_table(index, 1, tables, data[1], checked)) == []
    told = ["the sample that holds the file of 0.mp4 has no table of it that is right."]
    assert list(check_table(index, 1, tables, data[1], {})) == told
    (at,) = checked
    other = ClipTable.from_bytes(checked[at])
    other = replace(other, pts=other.pts + 40, start=other.start + 40)
    told = ["the table of 0.mp4 is not that of the file: it has another pts and start."]
    assert list(check_table(index, 1, tables, data[1], {at: other.to_bytes()})) == told
    sample = decode_sample(tables[(place := index.table(1)).offset : place.offset + place.size])
    moved = tuple(item._replace(span=(*item.span[:2], item.span[2] + 1, item.span[3])) for item in sample.items)
    told = ["the parts of 0.mp4 are not at the frames that its table says."]
    whole = ClipTable.from_bytes(checked[at])
    assert list(_compare("0.mp4", replace(sample, items=moved), whole)) == told
    assert list(_compare("0.mp4", sample, whole)) == []


def test_each_part_of_a_file_has_a_table_of_its_own_groups_of_pictures(media, tmp_path):
    lines = [_ask(str(n), {"type": "video", "video": "plain.mp4", "start": n, "end": n + 1.0}) for n in range(20)]
    lines.append(_ask("whole", {"type": "video", "video": "plain.mp4"}))
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_shards(tmp_path / "records.jsonl", tmp_path / "out", media_dir=str(media), workers=1)
    dataset = OpenDataset(str(tmp_path / "out"), None, IndexCache())
    drawn = _drawn(tmp_path / "out")
    tables = {
        own_id: decode_sample(dataset.tables([each.table])[0].result()).clips["0.mp4"] for own_id, each in drawn.items()
    }
    whole = tables.pop("whole")
    assert {table.num_gops for table in tables.values()} <= {1, 2}
    assert sum(len(table.offset) for table in tables.values()) < 1.2 * len(whole.offset)
    assert all(table.start == whole.start for table in tables.values())
    assert tables["7"].seconds(0) == 7.0


def test_shared_files_are_found_when_a_dataset_is_indexed_again(shards, processor, tmp_path):
    for path in shards.glob("*.tar"):
        shutil.copy(path, tmp_path)
    index_tars([str(tmp_path)], IndexOptions(workers=1))
    before, after = _drawn(shards), _drawn(tmp_path)
    assert {own_id: each.sizes for own_id, each in before.items()} == {k: each.sizes for k, each in after.items()}
    assert {own_id: each.members for own_id, each in before.items()} == {k: each.members for k, each in after.items()}
    found, expected = (_build(_plan(folder, processor, video_backend="av")) for folder in (tmp_path, shards))
    assert all(_same(found[own_id].batch, expected[own_id].batch) for own_id in expected)
    (tmp_path / "lost").mkdir()
    with tarfile.open(shards / "shard-000000.tar") as tar, tarfile.open(tmp_path / "lost" / "a.tar", "w") as lost:
        for member in tar.getmembers()[2:]:
            lost.addfile(member, tar.extractfile(member))
    index_tars([str(tmp_path / "lost" / "a.tar")], IndexOptions(workers=1))
    assert list(_drawn(tmp_path / "lost")) == ["open"]
    ledger = (tmp_path / "lost" / "ledger.jsonl").read_text()
    assert "'000000000.0.mp4', which holds its '0.mp4', does not lie before it in the tar" in ledger


def test_a_file_is_read_and_walked_once_for_records_that_follow_each_other(media, tmp_path, monkeypatch):
    reads, walks = [], []
    read, walk = media_bytes._read_file, clip_tables.parse_clip
    monkeypatch.setattr(media_bytes, "_read_file", lambda where, *more: reads.append(where) or read(where, *more))
    monkeypatch.setattr(
        clip_tables, "parse_clip", lambda data, container: walks.append(len(data)) or walk(data, container)
    )
    reader = media_bytes.MediaReader()
    for start in range(5):
        item = _clip(str(media / "plain.mp4"), start=start, end=start + 1)
        record = Record(source="", id="", origin="", conversation=_ask("", item)["messages"])
        assert build_sample(record, reader).sizes.videos[0].frames == 25
    assert (len(reads), len(walks)) == (1, 1)


def test_tars_of_others_may_name_seconds(media, processor, tmp_path):
    with tarfile.open(tmp_path / "others.tar", "w") as tar:
        for number, (_, (name, span, _)) in enumerate(SPANS.items()):
            suffix = name.rpartition(".")[2]
            chat = _ask("", {"type": "video", **span})["messages"]
            data = json.dumps({"messages": chat, "videos": [f"x.{suffix}"]}).encode()
            member = tarfile.TarInfo(f"{number:03d}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
            tar.add(media / name, f"{number:03d}.{suffix}")
    index_tars([str(tmp_path / "others.tar")], IndexOptions(workers=1))
    sizes = [each.sizes.videos[0].frames for each in _drawn(tmp_path).values()]
    assert [len(frames) for _, _, frames in SPANS.values() if frames] == [*sizes[:4], *sizes[5:]]
    plan = _plan(tmp_path, processor, video_backend="av")
    with plan.build.open() as builder:
        for planned in plan.blueprints(World(0, 1)):
            assert not builder.build(planned.blueprint).bad


SHOWN = {"messages": [{"role": "user", "content": "<video>?"}]}
PART = {"start": 1.0, "end": 3.0}
FORMS = [
    {"messages": [{"role": "user", "content": [_clip("small.mp4", **PART)]}]},
    {**SHOWN, "videos": [{"path": "small.mp4", **PART}]},
    {**SHOWN, "video": {"video": "small.mp4", **PART}},
    {**SHOWN, "video": "small.mp4", "start": 1, "end": 3},
    {**SHOWN, "videos": ["small.mp4"], "start": [1.0], "end": [3.0]},
    {**SHOWN, "videos": [{"path": "small.mp4", **PART}], "start": 0.0, "end": 0.5},
]


@pytest.mark.parametrize("record", FORMS, ids=range(len(FORMS)))
def test_every_form_may_name_seconds(media, tmp_path, record):
    record = {**record, "messages": [*record["messages"], {"role": "assistant", "content": "Yes."}]}
    (drawn,) = _drawn(_convert([record], media, tmp_path)).values()
    assert drawn.sizes.videos[0].frames == 20


def test_columns_of_tables_may_name_seconds(media, tmp_path):
    turns = [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "Yes."}]
    rows = {"messages": [turns] * 2, "video": ["small.mp4"] * 2, "from_s": [1.0, None], "to_s": [3.0, None]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    columns = {"start": "from_s", "end": "to_s"}
    make_shards(tmp_path / "rows.parquet", tmp_path / "out", media_dir=str(media), workers=1, columns=columns)
    assert sorted(each.sizes.videos[0].frames for each in _drawn(tmp_path / "out").values()) == [20, 40]


def test_the_viewer_shows_the_seconds(shards, processor):
    viewer = Viewer(normalise_sources(str(shards)), StreamOptions(mode="plain", max_frames=4), processor)
    try:
        for own_id, (_, span, frames) in SPANS.items():
            ((shard, row),) = viewer.catalog.datasets.opened[0].find(own_id)
            ref = Ref(0, shard, row)
            name = viewer.catalog.name_of(ref, *viewer.catalog.draw([ref]))
            (medium,) = viewer.samples.read(ref).media
            assert f"from {span['start']:g} s of its file on" in medium.says
            if frames is not None:
                assert [frame for frame, _ in medium.frames][-1] == len(frames) - 1
            assert len(viewer.frames_of(ref, 0)) == len(medium.frames)
            assert PICTURES["/thumb"](viewer, {**name._asdict(), "row": str(row)})
    finally:
        viewer.close()


def test_map_style_samples_name_seconds_of_files(media, processor):
    item = _clip(str(media / "plain.mp4"), start=8.0, end=12.0)
    conversation = _ask("", item)["messages"]
    wrapped = RobustDatasetWrapper([{"conversation": conversation}])
    wrapped.preload_media, wrapped.processor = True, processor
    ready = wrapped[0]["conversation"]
    shown = ready[0]["content"][0]
    assert shown["_total_frames"] == 100
    encoder = Encoder(processor, EncodeConfig())
    assert _same(encoder.encode(ready, {}), encoder.encode(conversation, {}))
    with pytest.raises(BadSampleError, match="the item holds frames or samples"):
        encoder.encode([{**ready[0], "content": [{**shown, "start": 1.0}]}, *ready[1:]], {})


def test_a_sound_may_be_a_part_of_a_file(media, tmp_path):
    sound = {"type": "audio", "audio": "a.wav", "start": 0.5, "end": 2.0}
    (drawn,) = _drawn(_convert([_ask("heard", sound)], media, tmp_path)).values()
    assert (drawn.sizes.audios[0].samples, drawn.sizes.audios[0].rate) == (24000, 16000)


BAD = {
    "turned": ({"start": 3.0, "end": 1.0}, r"small\.mp4: start and end are 3\.0 and 1\.0, no part of a clip"),
    "empty": ({"start": 1.0, "end": 1.0}, "no part of a clip; write seconds"),
    "behind": ({"start": 5.0, "end": 6.0}, r"5 s to 6 s is asked of a file of 4\.000 s"),
    "too long": ({"start": 1.0, "end": 9.0}, r"1 s to 9 s is asked of a file of 4\.000 s; mend start and end"),
    "text": ({"start": "1:00", "end": "2:00"}, "start and end are '1:00' and '2:00'"),
    "none": ({"start": 1.01, "end": 1.02}, r"no frame begins from 1\.01 to 1\.02 s"),
}


def test_a_bad_part_is_a_bad_record(media, tmp_path):
    lines = [_ask(own_id, _clip("small.mp4", **span)) for own_id, (span, _) in BAD.items()]
    lines += [_ask("good", _clip("small.mp4")), {**SHOWN, "id": "short", "videos": ["small.mp4"] * 2, "start": [1]}]
    lines[-1]["messages"] = [{"role": "user", "content": "<video><video>?"}, lines[0]["messages"][1]]
    out = _convert(lines, media, tmp_path, bad_budget=1)
    assert list(_drawn(out)) == ["good"]
    found = {bad.sample: bad for bad in map(BadSample.from_json, (out / "ledger.jsonl").read_text().splitlines())}
    assert {(bad.stage, bad.reason) for bad in found.values()} == {("convert", "bad_span")}
    for own_id, (_, sentence) in BAD.items():
        assert re.search(sentence, found[own_id].detail), found[own_id].detail
    assert "'start' has 1 numbers, and none for medium number 2" in "".join(bad.detail for bad in found.values())


def test_videos_of_one_clip_decode_their_own_groups_of_pictures(media, tmp_path, processor, monkeypatch):
    parts = [{"type": "video", "video": "plain.mp4", "start": n, "end": n + 1.0} for n in (1.0, 6.0, 11.0, 16.0)]
    (tmp_path / "records.jsonl").write_text(json.dumps(_ask("four", *parts)) + "\n")
    make_shards(tmp_path / "records.jsonl", tmp_path / "out", media_dir=str(media), workers=1)
    decoded = []
    decode = packets._Decoder.decode
    monkeypatch.setattr(
        packets._Decoder, "decode", lambda self, run, *job: decoded.append(run) or decode(self, run, *job)
    )
    plan = _plan(tmp_path / "out", processor)
    (blueprint,) = (each.blueprint for each in plan.blueprints(World(0, 1)))
    assert not _build(plan)["four"].bad
    assert decoded == [run for clip in blueprint.rows[0][0].clips for run in clip.cut.runs]
    assert len(decoded) == 4
