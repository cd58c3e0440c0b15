"""Verification finds each kind of damage, with shard, key and offset."""

from __future__ import annotations

import json
import pickle
import shutil
import tarfile
from dataclasses import fields, replace
from pathlib import Path

import crc32c
import numpy as np
import pytest

from vlm_stream.convert import verify_dataset
from vlm_stream.convert.rows import SampleCounts, recounted_index
from vlm_stream.errors import DatasetError
from vlm_stream.format import decode_index, index_name, load_manifest, read_index
from vlm_stream.storage import open_store


@pytest.fixture
def dataset(toy_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_shards, tmp_path / "copy"))


def _problems(dataset: Path) -> list[tuple[str, str, str, int]]:
    report = verify_dataset(str(dataset))
    return [(problem.kind, problem.shard, problem.key, problem.offset) for problem in report.problems]


def _index(dataset: Path, number: int):
    store = open_store(str(dataset))
    return read_index(store, load_manifest(store).shards[number])


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def test_whole_dataset_has_no_problems(toy_shards: Path) -> None:
    report = verify_dataset(str(toy_shards), workers=2)
    assert report.problems == ()
    assert (report.num_shards, report.num_samples) == (4, 200)


def test_flipped_bytes_are_found_in_their_samples(dataset: Path) -> None:
    index = _index(dataset, 1)
    payload = index.members(10)[1]
    _flip(dataset / "shard-000001.tar", payload.offset + 5)
    _flip(dataset / "shard-000001.tar", int(index.offset[20]))  # in a header
    assert _problems(dataset) == [
        ("crc_mismatch", "shard-000001.tar", index.key(10), int(index.offset[10])),
        ("crc_mismatch", "shard-000001.tar", index.key(20), int(index.offset[20])),
    ]
    (first, _) = verify_dataset(str(dataset)).problems
    assert str(first).startswith(
        f"shard-000001.tar {index.key(10)} at byte {index.offset[10]}: crc_mismatch: crc32c is "
    )


def test_flipped_byte_after_the_last_sample_is_found(dataset: Path) -> None:
    path = dataset / "shard-000000.tar"
    _flip(path, path.stat().st_size - 1)
    assert _problems(dataset) == [("changed_tar", "shard-000000.tar", "", -1)]


def test_truncated_tar_is_found_where_it_breaks(dataset: Path) -> None:
    index = _index(dataset, 2)
    path = dataset / "shard-000002.tar"
    path.write_bytes(path.read_bytes()[: int(index.offset[40]) + 700])
    assert _problems(dataset) == [
        ("wrong_size", "shard-000002.tar", "", -1),
        ("truncated", "shard-000002.tar", index.key(40), int(index.offset[40])),
    ]
    assert "700 of" in verify_dataset(str(dataset)).problems[1].detail


def test_missing_shard_and_missing_index(dataset: Path) -> None:
    (dataset / "shard-000000.tar").unlink()
    (dataset / "shard-000003.index.parquet").unlink()
    assert _problems(dataset) == [
        ("missing_shard", "shard-000000.tar", "", -1),
        ("missing_index", "shard-000003.tar", "", -1),
    ]
    store = open_store(str(dataset))
    with pytest.raises(
        DatasetError, match=r"shard-000003.index.parquet is missing, so shard-000003.tar cannot be read"
    ):
        read_index(store, load_manifest(store).shards[3])


def test_changed_index(dataset: Path) -> None:
    path = dataset / "shard-000001.index.parquet"
    counts = decode_index(path.read_bytes()).media.text_tokens
    path.write_bytes(recounted_index(path.read_bytes(), [SampleCounts(count + 1) for count in counts.tolist()]))
    assert _problems(dataset) == [
        ("changed_index", "shard-000001.tar", "", -1),
        ("wrong_count", "shard-000001.tar", "", -1),
    ]
    store = open_store(str(dataset))
    with pytest.raises(DatasetError, match="is not the index that the manifest describes"):
        read_index(store, load_manifest(store).shards[1])


def test_damaged_index(dataset: Path) -> None:
    path = dataset / "shard-000001.index.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    assert [kind for kind, *_ in _problems(dataset)] == ["changed_index", "damaged_index"]
    with pytest.raises(DatasetError, match="is not an index of this format"):
        decode_index(path.read_bytes())


@pytest.mark.parametrize("name", ["text_tokens", "label_tokens", "crc32c"])
def test_index_with_a_hole(dataset: Path, name: str) -> None:
    """A missing number, in a column that plans need and in one that only fetching needs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = dataset / "shard-000001.index.parquet"
    table = pq.read_table(path)
    values = table.column(name).to_pylist()
    column = pa.array([None, *values[1:]], type=table.schema.field(name).type)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), path)
    assert [kind for kind, *_ in _problems(dataset)] == ["changed_index", "damaged_index"]
    with pytest.raises(DatasetError, match=r"index is not an index of this format .*1 numbers are missing"):
        _ = decode_index(path.read_bytes()).places


def test_index_of_another_shard(dataset: Path) -> None:
    """Right columns, wrong tar: every range is checked against the bytes."""
    shutil.copy(dataset / "shard-000000.index.parquet", dataset / "shard-000001.index.parquet")
    kinds = {kind for kind, *_ in _problems(dataset)}
    assert {"changed_index", "wrong_count", "crc_mismatch"} <= kinds


def test_swapped_tar_of_the_same_size(dataset: Path) -> None:
    path = dataset / "shard-000003.tar"
    path.write_bytes(bytes(path.stat().st_size))
    index = _index(dataset, 3)
    found = _problems(dataset)
    assert [(kind, key) for kind, _, key, _ in found] == [("crc_mismatch", index.key(row)) for row in range(len(index))]


def test_unlisted_shard(dataset: Path) -> None:
    shutil.copy(dataset / "shard-000000.tar", dataset / "shard-000009.tar")
    assert _problems(dataset) == [("unlisted_shard", "shard-000009.tar", "", -1)]


def test_rows_that_do_not_fit_the_conversation(dataset: Path) -> None:
    """Sizes of media moved between neighbours: the bytes are whole, the rows are wrong."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = dataset / "shard-000000.index.parquet"
    table = pq.read_table(path)
    images = table.column("images").to_pylist()
    row = next(r for r in range(len(images) - 1) if len(images[r]) != len(images[r + 1]))
    images[row], images[row + 1] = images[row + 1], images[row]
    column = pa.array(images, type=table.schema.field("images").type)
    pq.write_table(table.set_column(table.schema.get_field_index("images"), "images", column), path)
    kinds = [kind for kind, *_ in _problems(dataset)]
    assert kinds == ["changed_index", "wrong_media", "wrong_media"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data | {"version": 99}, "has format version 99, this release reads version 4"),
        (
            lambda data: data | {"version": 3},
            r"has format version 3, and this release reads version 4.*cannot be read.*vlm-stream index --overwrite",
        ),
        (lambda data: data | {"version": 1, "shards": []}, "has format version 1, and this release reads version 4"),
        (lambda data: data | {"format": "other"}, "is not a manifest of this package"),
        (
            lambda data: data | {"shards": {k: v[:2] if isinstance(v, list) else v for k, v in data["shards"].items()}},
            "does not have the digest that it s",
        ),
        (lambda data: data | {"shards": data["shards"] | {"name": ["a"]}}, "lacks or misnames a field .*of one length"),
        (lambda data: data | {"shards": data["shards"] | {"size": []}}, r"lacks or misnames a field \('size'\)"),
        (lambda data: data | {"shards": []}, "lacks or misnames a field"),
        (lambda data: data | {"shards": data["shards"] | {"images": None}}, "lacks or misnames a field .*of one len"),
        (lambda data: data | {"shards": data["shards"] | {"name": "a.tar"}}, "lacks or misnames a field .*of one len"),
        (lambda data: {k: v for k, v in data.items() if k != "tokens"}, "lacks or misnames a field"),
        (lambda data: data | {"surprise": 1}, "lacks or misnames a field"),
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
    with pytest.raises(DatasetError, match=r"has no dataset.json: its conversion is not finished"):
        load_manifest(open_store(str(tmp_path / "nothing")))


def test_manifest_survives_its_json_and_its_digest_sees_every_shard(dataset: Path) -> None:
    from vlm_stream.format import Manifest, ShardList

    manifest = load_manifest(open_store(str(dataset)))
    assert ShardList.of(manifest.shards) == manifest.shards
    assert Manifest.from_json(manifest.to_json()) == manifest
    for number in range(4):
        for name, other in (("crc32c", 0), ("index_sha256", "other"), ("name", "other")):
            shards = list(manifest.shards)
            shards[number] = replace(shards[number], **{name: other})
            assert replace(manifest, shards=ShardList.of(shards)).digest != manifest.digest
    assert replace(manifest, home="s3://elsewhere", dropped={"a": 1}).digest == manifest.digest


def test_a_manifest_is_trusted_as_it_was_written_and_looked_at_closely_otherwise(dataset: Path) -> None:
    path = dataset / "dataset.json"
    manifest, text = load_manifest(open_store(str(dataset))), path.read_text()
    for written in (text, json.dumps(json.loads(text)), json.dumps(json.loads(text), indent=4)):
        path.write_text(written)
        assert load_manifest(open_store(str(dataset))) == manifest
    data = json.loads(text)
    assert data["shards"]["etag"] is None  # one value for all
    del data["crc32c"], data["joint_index_crc32c"]
    path.write_text(json.dumps(data | {"shards": manifest.shards.columns()}))
    assert load_manifest(open_store(str(dataset))) == replace(manifest, joint_index_crc32c=None)
    sums = data["shards"]["crc32c"]
    path.write_text(text.replace(str(sums[1]), str(sums[1] + 1)))
    with pytest.raises(DatasetError, match="does not have the digest that it states"):
        load_manifest(open_store(str(dataset)))
    path.write_text(text.replace(manifest.digest, "0" * 64))
    with pytest.raises(DatasetError, match="does not have the digest that it states"):
        load_manifest(open_store(str(dataset)))


def test_columns_of_a_manifest_are_read_when_they_are_asked_for(dataset: Path) -> None:
    store = open_store(str(dataset))
    shards, sent = load_manifest(store).shards, pickle.loads(pickle.dumps(load_manifest(store).shards))
    for each in (shards, sent):
        assert len(each) == 4
        assert not isinstance(each._columns["index_sha256"], list)
        assert each.column("index_sha256") == [entry.index_sha256 for entry in each]
        assert isinstance(each._columns["index_sha256"], list)
    assert sent == shards
    assert sent.without_etags() == shards


def test_another_form_with_a_right_checksum_is_told_by_its_version(dataset: Path) -> None:
    """What a later release may write: the columns cannot be cut out, or mean something else."""
    from vlm_stream.convert import manifest

    path = dataset / "dataset.json"
    _, _, rest = path.read_text().partition(",\n")
    newer = rest.replace('"version": 4', '"version": 5')
    for text in (newer, newer.replace('"shards": {\n', '"shards": {')):
        path.write_text(manifest._HEAD.format(crc32c.crc32c(text.encode())) + text)
        with pytest.raises(DatasetError, match="has format version 5"):
            load_manifest(open_store(str(dataset)))


def test_an_index_in_several_row_groups_says_the_same(dataset: Path) -> None:
    """Other writers cut them so, and each has a dictionary of its own."""
    import pyarrow.parquet as pq

    path = dataset / "shard-000000.index.parquet"
    whole = decode_index(path.read_bytes())
    pq.write_table(pq.read_table(path), path, row_group_size=7)
    cut = decode_index(path.read_bytes())
    assert pq.ParquetFile(path).num_row_groups > 1
    assert [cut.span(row) for row in range(len(cut))] == [whole.span(row) for row in range(len(whole))]
    assert (cut.keys, cut.totals(0)) == (whole.keys, whole.totals(0))


def test_index_survives_its_bytes(dataset: Path) -> None:
    data = (dataset / "shard-000002.index.parquet").read_bytes()
    index = decode_index(data)
    counts = zip(index.media.text_tokens.tolist(), index.media.label_tokens.tolist(), strict=True)
    assert recounted_index(data, [SampleCounts(*pair) for pair in counts]) == data
    assert "places" not in vars(index)  # not decoded before it is asked for
    with tarfile.open(dataset / "shard-000002.tar") as tar:
        in_tar = [(member.name, member.offset_data, member.size) for member in tar]
    in_index = [(row, member) for row in range(len(index)) for member in index.members(row)]
    assert [(f"{index.key(row)}.{name}", offset, size) for row, (name, offset, size) in in_index] == in_tar


def test_columns_of_media_that_a_shard_does_not_have_are_empty(dataset: Path) -> None:
    store = open_store(str(dataset))
    kinds = set()
    for shard in load_manifest(store).shards:
        index = read_index(store, shard)
        whole = decode_index((dataset / index_name(shard.name)).read_bytes())
        for name in (field.name for field in fields(whole.media)):
            left, right = getattr(index.media, name), getattr(whole.media, name)
            assert np.array_equal(left, right)
            assert (left.dtype, left.shape) == (right.dtype, right.shape)
        kinds.add(bool(shard.totals.videos))
    assert kinds == {True, False}
