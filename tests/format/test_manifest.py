"""A manifest is read as it was written, or refused with a sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from vlm_stream.errors import DatasetError
from vlm_stream.format import Manifest, ShardList, load_manifest
from vlm_stream.storage import open_store


@pytest.fixture
def dataset(toy_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_shards, tmp_path / "copy"))


def cut(columns: dict) -> dict:
    return {name: column[:2] if isinstance(column, list) else column for name, column in columns.items()}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data | {"version": 99}, "has format version 99, this release reads version 7 alone"),
        (
            lambda data: data | {"version": 4, "shards": []},
            r"has format version 4, .*it cannot be read. The tars are as they were; .*: vlm-stream index --overwrite",
        ),
        (lambda data: data | {"format": "other"}, "is not a manifest of this package"),
        (
            lambda data: data | {"shards": cut(data["shards"]) | {"entries": cut(data["shards"]["entries"])}},
            "does not have the checksum or the digest",
        ),
        (lambda data: data | {"shards": data["shards"] | {"name": ["a"]}}, "lacks or misnames a field .*of one length"),
        (lambda data: data | {"shards": data["shards"] | {"size": []}}, r"lacks or misnames a field \('size'\)"),
        (lambda data: data | {"shards": []}, "lacks or misnames a field"),
        (lambda data: data | {"shards": data["shards"] | {"images": None}}, "lacks or misnames a field .*of one len"),
        (lambda data: data | {"shards": data["shards"] | {"name": "a.tar"}}, "lacks or misnames a field .*of one len"),
        (lambda data: {k: v for k, v in data.items() if k != "tokens"}, "lacks or misnames a field"),
        (lambda data: data | {"surprise": 1}, "lacks or misnames a field"),
        (lambda data: data | {"shards": data["shards"] | {"entries": {}}}, "do not add up to their samples"),
        (lambda data: data | {"shards": data["shards"] | {"entries": 3}}, "lacks or misnames a field"),
        (lambda data: [data], "is not a manifest of this package"),
    ],
)
def test_manifests_that_cannot_be_trusted_are_refused(dataset: Path, change, sentence: str) -> None:
    path = dataset / "dataset.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DatasetError, match=sentence):
        load_manifest(open_store(str(dataset)))


def test_broken_and_missing_manifests(dataset: Path, tmp_path: Path) -> None:
    (dataset / "dataset.json").write_text("{")
    with pytest.raises(DatasetError, match="is not JSON"):
        load_manifest(open_store(str(dataset)))
    with pytest.raises(DatasetError, match=r"there is no folder .*nothing, so there is no dataset to read"):
        load_manifest(open_store(str(tmp_path / "nothing")))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DatasetError, match=r"has no dataset.json: its conversion is not finished"):
        load_manifest(open_store(str(tmp_path / "nothing")))


def test_manifest_survives_its_json_and_its_digest_sees_every_shard(dataset: Path) -> None:
    manifest = load_manifest(open_store(str(dataset)))
    assert ShardList.of(manifest.shards) == manifest.shards
    assert Manifest.from_json(manifest.to_json()) == manifest
    for number in range(len(manifest.shards)):
        for name, other in (("crc32c", 0), ("index_sha256", "other"), ("name", "other")):
            shards = list(manifest.shards)
            shards[number] = replace(shards[number], **{name: other})
            assert replace(manifest, shards=ShardList.of(shards)).digest != manifest.digest
    assert replace(manifest, home="s3://elsewhere", dropped={"a": 1}).digest == manifest.digest


def test_any_form_of_the_same_json_is_the_same_manifest(dataset: Path) -> None:
    path = dataset / "dataset.json"
    manifest, text = load_manifest(open_store(str(dataset))), path.read_text()
    data = json.loads(text)
    assert data["shards"]["etag"] is None  # one value for all
    entries = data["shards"].pop("entries")
    assert {name: sum(counts) for name, counts in entries.items()} == {"captions": 30, "clips": 7, "dialogues": 23}
    columns = {name: manifest.shards.column(name) for name in data["shards"]} | {"entries": entries}
    data["shards"]["entries"] = entries
    for form in (data, data | {"shards": columns}):
        path.write_text(json.dumps(form, indent=4))
        assert load_manifest(open_store(str(dataset))) == manifest
    sums = data["shards"]["crc32c"]
    for damaged in (text.replace(str(sums[1]), str(sums[1] + 1)), text.replace(manifest.digest, "0" * 64)):
        path.write_text(damaged)
        with pytest.raises(DatasetError, match="does not have the checksum or the digest that it states"):
            load_manifest(open_store(str(dataset)))
