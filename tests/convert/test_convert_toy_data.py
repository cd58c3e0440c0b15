"""Records become shards that our own index and WebDataset both read."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import subprocess
import tarfile
import warnings
from pathlib import Path

import crc32c
import numpy as np
import pytest
from PIL import Image

from vlm_stream.conversation import iter_media
from vlm_stream.convert import make_shards
from vlm_stream.errors import ConfigError
from vlm_stream.format import load_manifest, read_index
from vlm_stream.sources import open_source
from vlm_stream.storage import ReadOptions, SpanReader, open_store


def test_shards_hold_every_record_with_its_media_bit_for_bit(toy_meta: Path, toy_shards: Path) -> None:
    source = open_source(str(toy_meta))
    samples = {}
    for path in sorted(toy_shards.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                assert (member.mtime, member.uid, member.gid, member.uname) == (0, 0, 0, "")
                key, _, name = member.name.partition(".")
                samples.setdefault(key, {})[name] = tar.extractfile(member).read()
    assert sorted(samples) == [f"{number:09d}" for number in range(len(source))]
    for number in range(len(source)):
        record = source.read(number)
        sample = samples[f"{number:09d}"]
        text = json.loads(sample["json"])
        assert (text["id"], text["source"]) == (record.own_id, record.source)
        for stored, given in zip(iter_media(text["conversation"]), iter_media(record.conversation), strict=True):
            medium = given["type"]
            assert sample[stored.pop(medium)] == Path(given.pop(medium)).read_bytes()
        assert text["conversation"] == record.conversation


def test_files_have_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "words"}) + "\n")
    before = os.umask(0o027)
    try:
        make_shards(tmp_path / "a.jsonl", tmp_path / "out", workers=1)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").glob("shard-*")}
    assert modes == dict.fromkeys(("shard-000000.tar", "shard-000000.index.parquet"), "0o640")


def test_index_rows_describe_the_tar(toy_shards: Path) -> None:
    store = open_store(str(toy_shards))
    manifest = load_manifest(store)
    assert [shard.totals.samples for shard in manifest.shards] == [64, 64, 64, 8]
    for shard in manifest.shards:
        index = read_index(store, shard)
        data = (toy_shards / shard.name).read_bytes()
        assert len(data) == shard.totals.bytes
        assert index.offset[0] == 0
        assert np.array_equal(index.offset[1:], (index.offset + index.size)[:-1])
        assert index.offset[-1] + index.size[-1] + 1024 == len(data)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = {member.name: (member.offset_data, member.size) for member in tar}
        for row in range(len(index)):
            span = index.span(row)
            assert crc32c.crc32c(data[span.offset : span.offset + span.size]) == span.crc32c
            for name, offset, size in span.members:
                assert members.pop(f"{index.key(row)}.{name}") == (offset, size)
        assert not members


def test_index_holds_the_sizes_of_the_media(toy_shards: Path) -> None:
    store = open_store(str(toy_shards))
    for shard in load_manifest(store).shards:
        index = read_index(store, shard)
        with SpanReader(ReadOptions()) as reader:
            for row, members in enumerate(reader.begin([index.span(row) for row in range(len(index))]).results()):
                items = list(iter_media(json.loads(bytes(members["json"]))["conversation"]))
                images = [Image.open(io.BytesIO(members[i["image"]])).size for i in items if i["type"] == "image"]
                begin, end = index.media.image_splits[row : row + 2]
                assert index.media.image_sizes[begin:end].tolist() == [[height, width] for width, height in images]
                num_videos = sum(item["type"] == "video" for item in items)
                assert np.diff(index.media.video_splits)[row] == num_videos


def test_webdataset_reads_the_shards(toy_shards: Path) -> None:
    import webdataset as wds

    paths = sorted(map(str, toy_shards.glob("*.tar")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # WebDataset leaves its files to the collector
        samples = list(wds.WebDataset(paths, shardshuffle=False, empty_check=False))
        gc.collect()
    assert [sample["__key__"] for sample in samples] == [f"{number:09d}" for number in range(200)]
    for sample in samples:
        for item in iter_media(json.loads(sample["json"])["conversation"]):
            assert sample[item[item["type"]]]


def test_finished_target_is_not_written_to(toy_meta: Path, toy_shards: Path, digests, caplog) -> None:
    before = digests(toy_shards)
    with pytest.raises(ConfigError, match=r"holds a finished dataset; nothing was written.*overwrite=True"):
        make_shards(toy_meta, toy_shards, samples_per_shard=64, resume=False)
    with pytest.raises(ConfigError, match=r"of another conversion \(samples_per_shard was 64 and is 65\); nothing was"):
        make_shards(toy_meta, toy_shards, samples_per_shard=65)
    report = make_shards(toy_meta, toy_shards, samples_per_shard=64)
    assert (report.num_kept, report.totals.samples) == (4, 200)
    assert "holds this dataset already" in caplog.text
    assert digests(toy_shards) == before


@pytest.mark.skipif(shutil.which("energon") is None, reason="megatron-energon is not installed")
def test_energon_prepares_the_shards(toy_shards: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(toy_shards, tmp_path / "copy")
    command = ["energon", "prepare", copy, "--non-interactive", "--split-ratio", "1,0,0"]
    subprocess.run(
        [*command, "--sample-type", "CrudeWebdataset", "--num-workers", "1"], check=True, capture_output=True
    )
    info = json.loads((copy / ".nv-meta" / ".info.json").read_text())
    assert list(info["shard_counts"].values()) == [64, 64, 64, 8]
