"""Every kind of bad medium costs one sample and one line of the ledger, and nothing else."""

from __future__ import annotations

import base64
import http.server
import json
import os
import stat
import struct
import threading
import zlib
from functools import partial
from typing import TYPE_CHECKING

import pytest

from vlm_stream.convert import make_shards
from vlm_stream.convert.media_bytes import MediaReader
from vlm_stream.errors import BadBudgetError, SourceError, clean
from vlm_stream.format import load_manifest, read_index
from vlm_stream.ledger import BadSample
from vlm_stream.storage import open_store
from vlm_stream.testing import make_jpeg, make_mp4, make_png_with_alpha, make_wav

if TYPE_CHECKING:
    from pathlib import Path


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""
    chunks = b"\x89PNG\r\n\x1a\n"
    for kind, data in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", b""),
        (b"IEND", b""),
    ):
        chunks += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return chunks


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """A folder of good and bad media."""
    folder = tmp_path / "media"
    (folder / "folder.jpg").mkdir(parents=True)
    files = {
        "good.jpg": make_jpeg(40, 60),
        "good.mp4": make_mp4(num_frames=6, height=48, width=64, fps=4.0),
        "good.wav": make_wav(0.5),
        "empty.jpg": b"",
        "text.jpg": b"this is not an image",
        "cut.jpg": make_jpeg(40, 60)[:11],
        "bomb.png": _png_header(60_000, 60_000),
        "sliver.png": make_png_with_alpha(2, 402),
        "cut.mp4": make_mp4(num_frames=6, height=48, width=64, fps=4.0)[:300],
        "text.wav": b"this is no sound",
        "other.jpg": make_jpeg(40, 61),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (tmp_path / "secret.jpg").write_bytes(make_jpeg(30, 30))
    (folder / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    os.mkfifo(folder / "pipe.jpg")
    return folder


def _record(medium: str, where: object, **extras: object) -> dict[str, object]:
    entry = {"path": where, **extras} if extras else where
    return {"id": str(where)[:40], "messages": [{"role": "user", "content": f"<{medium}>what?"}], f"{medium}s": [entry]}


def _convert(
    records: list[object], folder: Path, tmp_path: Path, **settings: object
) -> tuple[dict[str, BadSample], int]:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    report = make_shards(tmp_path / "data.jsonl", tmp_path / "out", media_dir=str(folder), bad_budget=1, **settings)
    lines = (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()
    return {bad.sample: bad for bad in map(BadSample.from_json, lines)}, report.totals.samples


BAD = [
    ("image", "none.jpg", "missing_file", "there is no file .*none.jpg"),
    ("image", "good.jpg/x.jpg", "missing_file", "there is no file"),
    ("image", "empty.jpg", "empty_file", "empty.jpg has zero bytes"),
    ("image", "folder.jpg", "not_a_file", "folder or a device"),
    ("image", "pipe.jpg", "not_a_file", "folder or a device"),
    ("image", "bad\0name.jpg", "unreadable_file", "cannot be read"),
    ("image", "text.jpg", "bad_image", "text.jpg: The bytes are not an image"),
    ("image", "cut.jpg", "bad_image", "cut.jpg: The bytes are not an image"),
    ("image", "bomb.png", "image_too_large", "bomb.png: The image is too large"),
    ("image", "sliver.png", "extreme_shape", "cannot be used"),
    ("image", "data:image/png;base64,@@@", "bad_data_url", "is not a data URL"),
    ("image", "data:image/png;base64,", "empty_file", "has zero bytes"),
    ("image", "ftp://host/a.jpg", "bad_url", "ftp://host/a.jpg names no object"),
    ("image", "s3://bucket/a/../b.jpg", "bad_url", "have no '..'"),
    ("video", "cut.mp4", "bad_video", "cut.mp4"),
    ("video", ["good.jpg", "other.jpg"], "bad_video", "frames of a video differ in size"),
    ("audio", "text.wav", "bad_audio", "text.wav: The bytes are not WAV, FLAC, Ogg or MP3"),
]


def test_each_kind_of_bad_medium_is_named(media: Path, tmp_path: Path) -> None:
    import re

    good = _record("image", "good.jpg")
    bad, num_samples = _convert([good, *(_record(kind, where) for kind, where, _, _ in BAD), good], media, tmp_path)
    assert num_samples == 2
    assert len(bad) == len(BAD)
    for _, where, reason, sentence in BAD:
        found = bad[clean(str(where)[:40])]
        assert (found.stage, found.reason) == ("convert", reason)
        assert re.search(sentence, found.detail), found.detail


@pytest.mark.parametrize("known", [0, 1, 99, 100, 101, 10**6])
def test_a_file_is_read_to_its_end_whatever_its_size_was(tmp_path: Path, monkeypatch, known: int) -> None:
    path = tmp_path / "grows.bin"
    path.write_bytes(bytes(range(100)))
    found = list(path.stat())
    found[stat.ST_SIZE] = known
    monkeypatch.setattr(os, "stat", lambda *_, **__: os.stat_result(found))
    assert MediaReader().read(str(path), None) == bytes(range(100))


def test_frame_numbers_that_are_none_are_named(media: Path, tmp_path: Path) -> None:
    records = [_record("video", "good.mp4", frame_indices=indices) for indices in ([], ["1"], "all", [0, 3])]
    for number, record in enumerate(records):
        record["id"] = str(number)
    bad, num_samples = _convert(records, media, tmp_path)
    assert {sample: found.reason for sample, found in bad.items()} == dict.fromkeys("012", "frame_index")
    assert num_samples == 1


def test_bad_record_leaves_its_shard_smaller_and_no_border_moves(media: Path, tmp_path: Path) -> None:
    names = ["good.jpg", "none.jpg", "good.jpg", "good.jpg", "none.jpg", "empty.jpg", "good.jpg"]
    _convert([_record("image", name) for name in names], media, tmp_path, samples_per_shard=2)
    store = open_store(str(tmp_path / "out"))
    manifest = load_manifest(store)
    keys = [read_index(store, shard).keys for shard in manifest.shards]
    assert keys == [["000000000"], ["000000002", "000000003"], [], ["000000006"]]
    assert manifest.dropped == {"convert: empty_file": 1, "convert: missing_file": 2}


@pytest.mark.parametrize("where", ["../secret.jpg", "link.jpg", "/etc/hostname", "file:///etc/hostname"])
def test_confined_media_do_not_leave_their_folder(media: Path, tmp_path: Path, where: str) -> None:
    records = [_record("image", "good.jpg"), _record("image", where)]
    bad, num_samples = _convert(records, media, tmp_path, confine_media=True)
    assert num_samples == 1
    assert bad[where].reason == "escapes_media_dir"
    assert "media are confined to it" in bad[where].detail


def test_confining_needs_a_folder(media: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare.jsonl"
    path.write_text(json.dumps(_record("image", str(media / "good.jpg"))))
    with pytest.raises(BadBudgetError, match="1 of 1 records cannot be used, and a dataset without samples"):
        make_shards(path, tmp_path / "bare", confine_media=True)
    assert "its source has no media_dir" in (tmp_path / "bare" / "ledger.jsonl").read_text()


def test_a_confined_name_that_is_no_path_costs_one_record(media: Path, tmp_path: Path) -> None:
    records = [_record("image", "bad\0name.jpg"), _record("image", "good.jpg")]
    bad, num_samples = _convert(records, media, tmp_path, confine_media=True)
    assert num_samples == 1
    assert bad["bad\\x00name.jpg"].reason == "unreadable_file"
    assert "is no path (embedded null byte)" in bad["bad\\x00name.jpg"].detail


def test_rates_that_are_none_are_named(media: Path, tmp_path: Path) -> None:
    rates = ("30", -2, float(10**300) * 10**300, [2], 2, None, 0)
    records = [_record("video", ["good.jpg", "good.jpg"], fps=fps) | {"id": str(n)} for n, fps in enumerate(rates)]
    text = "".join(json.dumps(record).replace("Infinity", "1e999") + "\n" for record in records)
    (tmp_path / "data.jsonl").write_text(text)
    report = make_shards(tmp_path / "data.jsonl", tmp_path / "out", media_dir=str(media), bad_budget=None)
    assert report.dropped == {"convert: bad_fps": 4}
    assert report.totals.samples == 3


def test_unconfined_links_are_followed(media: Path, tmp_path: Path) -> None:
    assert _convert([_record("image", "link.jpg"), _record("image", "../secret.jpg")], media, tmp_path) == ({}, 2)


def test_good_media_of_every_kind_and_origin(media: Path, tmp_path: Path) -> None:
    import lmdb

    jpeg = (media / "good.jpg").read_bytes()
    with lmdb.open(str(media / "db")) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"pictures/1", jpeg)
    handler = partial(_QuietHandler, directory=str(media))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        places = [
            "db::pictures/1",
            f"file://{media}/good.jpg",
            "data:image/jpeg;base64," + base64.b64encode(jpeg).decode(),
            f"{url}/good.jpg",
            f"{url}/none.jpg",
            "db::none",
        ]
        records = [
            *(_record("image", place) for place in places),
            _record("video", "good.mp4"),
            _record("video", ["good.jpg", "good.jpg", "link.jpg"][:2], fps=2),
            _record("audio", "good.wav"),
        ]
        bad, num_samples = _convert(records, media, tmp_path, media_hosts=("127.0.0.1",))
        server.shutdown()
    assert {sample: found.reason for sample, found in bad.items()} == {
        f"{url}/none.jpg": "missing_file",
        "db::none": "missing_file",
    }
    assert num_samples == 7
    store = open_store(str(tmp_path / "out"))
    (shard,) = load_manifest(store).shards
    index = read_index(store, shard)
    assert index.media.image_sizes.tolist() == [[40, 60]] * 4
    assert index.media.video_sizes.tolist() == [[6, 48, 64], [2, 40, 60]]
    assert index.media.video_picked.tolist() == [0, 2]
    assert index.media.video_seconds.tolist() == [1.5, 1.0]
    assert index.media.audio_sizes.tolist() == [[8000, 16000]]
    frames = index.members(5)
    assert [member.name for member in frames] == ["json", "0.jpg"]  # shown twice, stored once


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def test_extension_follows_the_bytes(media: Path, tmp_path: Path) -> None:
    (media / "really_png.jpg").write_bytes(make_png_with_alpha(30, 30))
    (media / "no_extension").write_bytes(make_jpeg(30, 30))
    (media / "photo.JPEG").write_bytes(make_jpeg(30, 30))
    _convert([_record("image", name) for name in ("really_png.jpg", "no_extension", "photo.JPEG")], media, tmp_path)
    store = open_store(str(tmp_path / "out"))
    index = read_index(store, load_manifest(store).shards[0])
    assert [index.members(row)[1].name for row in range(3)] == ["0.png", "0.jpg", "0.jpeg"]


def test_mismatches_are_dropped_kept_or_raised(media: Path, tmp_path: Path) -> None:
    surplus = {"id": "s", "messages": [{"role": "user", "content": "<image><image>hi"}], "images": ["good.jpg"]}
    good = {"id": "g", "messages": [{"role": "user", "content": "hi"}]}
    bad, num_samples = _convert([surplus, good], media, tmp_path)
    assert (bad[f"{tmp_path}/data.jsonl:1 (id s)"].reason, num_samples) == ("surplus_placeholder", 1)

    report = make_shards(
        tmp_path / "data.jsonl", tmp_path / "kept", media_dir=str(media), on_mismatch="keep", samples_per_shard=5
    )
    assert (report.totals.samples, report.dropped, report.kept) == (2, {}, {"surplus_placeholder": 1})
    kept = BadSample.from_json((tmp_path / "kept" / "ledger.jsonl").read_text())
    assert (kept.stage, kept.reason) == ("kept", "surplus_placeholder")

    with pytest.raises(SourceError, match="on_mismatch='raise'"):
        make_shards(tmp_path / "data.jsonl", tmp_path / "raised", media_dir=str(media), on_mismatch="raise")
    assert not (tmp_path / "raised" / "dataset.json").exists()


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_medium_that_is_null_where_a_text_shows_it_is_counted(tmp_path: Path, nothing: object) -> None:
    said = [("<image>\nWhat?", nothing), ("What is an <image> tag?", []), ("hi", nothing)]
    records = [
        {
            "id": str(n),
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}],
            "images": i,
        }
        for n, (text, i) in enumerate(said)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    report = make_shards(tmp_path / "data.jsonl", tmp_path / "out")
    assert (report.totals.samples, report.dropped, report.kept) == (3, {}, {"placeholder_as_text": 1})
    line = BadSample.from_json((tmp_path / "out" / "ledger.jsonl").read_text())
    shown = "null" if nothing is None else "''"
    assert (line.sample, line.detail) == ("0", f"<image> stays text, because 'images' is {shown}")


def test_unreadable_records_are_named_with_their_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "fine"}]}\n{broken\n')
    (tmp_path / "b.jsonl").write_text('{"messages": 5}\n')
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"first": {"file_name": "a.jsonl"}, "second": {"file_name": "b.jsonl"}}))
    report = make_shards(meta, tmp_path / "out", bad_budget=1)
    assert report.totals.samples == 1
    bad = [BadSample.from_json(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    assert [(found.source, found.reason) for found in bad] == [
        ("first", "broken_json"),
        ("second", "messages_not_a_list"),
    ]
    assert bad[0].sample.endswith("a.jsonl:2")
