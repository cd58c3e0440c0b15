"""The same datasets on a real S3 server: written, resumed, verified, indexed, with media from there too."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from vlm_stream.convert import IndexOptions, index_tars, make_shards, verify_dataset
from vlm_stream.format import load_manifest, read_index
from vlm_stream.storage import SpanReader, open_store
from vlm_stream.testing import make_jpeg

if TYPE_CHECKING:
    from pathlib import Path


class _StopError(Exception):
    pass


def _stop(part, num_shards: int) -> None:
    raise _StopError


def test_remote_shards_have_the_bytes_of_local_ones(s3_server, toy_meta: Path, toy_shards: Path, digests) -> None:
    url = s3_server.url("shards-equal")
    settings = {"samples_per_shard": 64, "store": s3_server.options}
    with pytest.raises(_StopError):
        make_shards(toy_meta, url, on_part=_stop, **settings)
    store = open_store(url, s3_server.options)
    assert [info.path for info in store.list()] == [
        ".job/job.json",
        ".job/shard-000000.json",
        "shard-000000.index.parquet",
        "shard-000000.tar",
    ]
    report = make_shards(toy_meta, url, resume=True, **settings)
    assert (report.num_kept, report.num_shards) == (1, 4)

    expected = digests(toy_shards)
    found = {info.path: hashlib.sha256(store.get(info.path)).hexdigest() for info in store.list()}
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} == {"dataset.json"}  # it has etags
    manifest = load_manifest(store)
    assert manifest.digest == load_manifest(open_store(str(toy_shards))).digest
    assert all(shard.etag for shard in manifest.shards)
    assert verify_dataset(url, store=s3_server.options).problems == ()

    index = read_index(store, manifest.shards[2])
    with SpanReader(store_options=s3_server.options) as reader:
        results = reader.begin([index.span(row) for row in range(8)]).results()
    assert all("json" in members for members in results)


def test_copied_dataset_forgets_the_etags_of_its_old_home(s3_server, toy_meta: Path, tmp_path: Path) -> None:
    url = s3_server.url("shards-moved")
    make_shards(toy_meta, url, samples_per_shard=200, store=s3_server.options)
    store = open_store(url, s3_server.options)
    copy = open_store(str(tmp_path / "copy"))
    for info in store.list():
        copy.put(info.path, store.get(info.path))
    assert [shard.etag for shard in load_manifest(copy).shards] == [None]
    assert verify_dataset(copy.root).problems == ()


def test_media_from_an_object_store(s3_server, tmp_path: Path) -> None:
    url = s3_server.url("shards-media")
    store = open_store(url, s3_server.options)
    store.put("pictures/1.jpg", make_jpeg(30, 40))
    data = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "<image>?"}]
    names = ["pictures/1.jpg", "pictures/none.jpg", "../elsewhere/1.jpg"]
    data.write_text("".join(json.dumps({"messages": turns, "images": [name]}) + "\n" for name in names))
    settings = {"media_dir": url, "store": s3_server.options, "confine_media": True, "max_shard_bytes": 4096}
    report = make_shards(data, tmp_path / "out", bad_budget=None, **settings)
    assert report.totals.image_pixels == 1200
    assert report.dropped == {"convert: escapes_media_dir": 1, "convert: missing_file": 1}


def test_remote_tars_are_indexed_in_place_or_elsewhere(s3_server, toy_shards: Path, tmp_path: Path) -> None:
    url = s3_server.url("shards-foreign")
    store = open_store(url, s3_server.options)
    for number in range(2):
        store.put(f"part-{number:03d}.tar", toy_shards / f"shard-{number:06d}.tar")
    pattern = url + "/part-{000..001}.tar"
    beside = index_tars([pattern], IndexOptions(store=s3_server.options))
    elsewhere = index_tars([pattern], IndexOptions(store=s3_server.options, out=str(tmp_path / "indexes")))
    assert beside.digest == elsewhere.digest
    assert elsewhere.tars == url
    assert beside.totals.samples == 128
    for place in (url, str(tmp_path / "indexes")):
        named = replace(s3_server.options, tars=(url,) if place != url else ())
        assert verify_dataset(place, store=named).problems == ()
