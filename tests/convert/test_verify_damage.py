"""Verification finds each kind of damage, with shard, key and offset."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vlm_stream.convert import verify_dataset
from vlm_stream.convert.rows import SampleCounts, recounted_index
from vlm_stream.errors import DatasetError
from vlm_stream.format import decode_index, load_manifest, read_index
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
        decode_index(path.read_bytes())


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
