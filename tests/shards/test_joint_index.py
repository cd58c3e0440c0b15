"""All indexes in one: the same as each by itself, and no more than a shortcut."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import fields, replace
from pathlib import Path

import crc32c
import numpy as np
import pyarrow as pa
import pytest

from vlm_stream import StreamLoader
from vlm_stream.errors import AccessError, DatasetError
from vlm_stream.shards import (
    index_tars,
    joint_index,
    load_manifest,
    make_shards,
    read_index,
    read_joint_index,
    verify_dataset,
)
from vlm_stream.shards import recount as recount_dataset
from vlm_stream.shards.foreign import IndexOptions
from vlm_stream.shards.layout import index_name
from vlm_stream.storage import open_store
from vlm_stream.storage.local import LocalStore
from vlm_stream.stream import StreamOptions, normalise_sources, open_planner
from vlm_stream.tokens import MediaColumns, TokenColumns, count_tokens, counted_as

JOINT = "dataset.indexes.arrow"


@pytest.fixture(scope="session")
def many_shards(toy_meta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy dataset as 25 shards (shared: copy it before changing it)."""
    out = tmp_path_factory.mktemp("many") / "out"
    make_shards(toy_meta, out, samples_per_shard=8)
    return out


@pytest.fixture
def dataset(many_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(many_shards, tmp_path / "copy"))


def assert_same(folder: Path) -> None:
    store = open_store(str(folder))
    manifest = load_manifest(store)
    joint = read_joint_index(store, manifest)
    for number, entry in enumerate(manifest.shards):
        cut, single = joint.shard(number), read_index(store, entry, tars=manifest.tars)
        for field in fields(MediaColumns):
            one, other = getattr(cut.media, field.name), getattr(single.media, field.name)
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, err_msg=field.name)
        assert (cut.keys, cut.crc32c) == (single.keys, single.crc32c)
        assert len(cut) == len(single)
        for row in range(len(single)):
            assert cut.span(row) == single.span(row)
            assert cut.key(row) == single.key(row)
            assert cut.sizes(row) == single.sizes(row)
        assert cut.totals(5) == single.totals(5)
    sizes = manifest.shards.column("samples")
    places = np.array([(shard, row) for shard, size in enumerate(sizes) for row in range(size)])
    np.random.default_rng(0).shuffle(places)
    some = [(joint.shard(shard), row) for shard, row in places.tolist()]
    assert joint.spans(*places.T) == [index.span(row) for index, row in some]
    assert joint.names(*places.T) == [(index.path, index.key(row)) for index, row in some]
    assert joint.counted_as == counted_as(manifest.geometry.digest())
    kept, counted = joint.counts(slice(None)), count_tokens(joint.media(slice(0, sum(sizes))), manifest.geometry)
    for field in fields(TokenColumns):
        np.testing.assert_array_equal(getattr(kept, field.name), getattr(counted, field.name), err_msg=field.name)


def keys_of(folder: Path) -> list[str]:
    """Return the keys of an epoch in their order."""
    loader = StreamLoader(
        str(folder), processor=None, mode="plain", window=64, seed=3, collate_fn=lambda rows, _: {"rows": rows}
    )
    return [row.key for batch in loader for row in batch["rows"]]


def without_indexes(folder: Path) -> None:
    for path in folder.glob("shard-*.index.parquet"):
        path.unlink()


def test_each_shard_is_what_its_own_index_says(many_shards):
    assert_same(many_shards)
    assert verify_dataset(str(many_shards)).problems == ()


def test_shards_without_samples_are_there_too(tmp_path):
    raw = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    broken = {"messages": [*turns, {"role": "nobody", "content": ""}]}
    records = [broken if 4 <= number < 8 else {"messages": turns} for number in range(40)]
    raw.write_text("".join(json.dumps(record) + "\n" for record in records))
    make_shards(raw, tmp_path / "out", samples_per_shard=2, bad_budget=1.0)
    samples = [shard.totals.samples for shard in load_manifest(open_store(str(tmp_path / "out"))).shards]
    assert len(samples) == 20
    assert samples.count(0) == 2
    assert_same(tmp_path / "out")


def test_a_run_needs_no_other_index(dataset):
    expected = keys_of(dataset)
    without_indexes(dataset)
    assert len(expected) == len(set(expected)) == 200
    assert keys_of(dataset) == expected


@pytest.mark.parametrize("damage", ["gone", "flipped", "of another dataset"])
def test_without_it_the_order_is_the_same_and_one_line_says_so(dataset, damage, caplog):
    expected = keys_of(dataset)
    path = dataset / JOINT
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    else:
        shutil.copy(dataset / "shard-000000.index.parquet", path)
    with caplog.at_level(logging.WARNING):
        assert keys_of(dataset) == expected
    (line,) = (record.getMessage() for record in caplog.records)
    fact = "is missing" if damage == "gone" else "is not the one that the manifest describes"
    assert line == (
        f"{dataset}/{JOINT} {fact}. The indexes of its shards are read one by one instead, so the start takes longer; "
        f"write it again with: vlm-stream recount --processor ... {dataset}"
    )
    (problem,) = verify_dataset(str(dataset)).problems
    assert (problem.kind, problem.shard) == ("wrong_joint_index", JOINT)


def test_a_store_that_refuses_it_is_read_without_it(dataset, monkeypatch, caplog):
    expected = keys_of(dataset)
    get = LocalStore.get

    def refuse(store, path):
        if path == JOINT:
            raise AccessError("403")
        return get(store, path)

    monkeypatch.setattr(LocalStore, "get", refuse)
    with caplog.at_level(logging.WARNING):
        assert keys_of(dataset) == expected
    assert "could not be read: 403 The indexes of its shards are read one by one instead" in caplog.text


def test_indexes_that_the_manifest_does_not_describe_are_not_joined(dataset):
    store = open_store(str(dataset))
    shutil.copy(dataset / "shard-000002.index.parquet", dataset / "shard-000001.index.parquet")
    with pytest.raises(DatasetError, match=r"shard-000001.index.parquet is not the index that the manifest describes"):
        joint_index.with_joint_index(store, load_manifest(store))


@pytest.mark.parametrize("is_wide", [False, True])
def test_places_are_narrow_where_shards_are_small(toy_meta, tmp_path, monkeypatch, is_wide):
    if is_wide:
        monkeypatch.setattr(joint_index, "_MAX_NARROW", 1)
    make_shards(toy_meta, tmp_path / "out", samples_per_shard=8)
    table = pa.ipc.open_stream((tmp_path / "out" / JOINT).read_bytes()).read_all()
    assert table.schema.field("offset").type == (pa.int64() if is_wide else pa.int32())
    assert_same(tmp_path / "out")
    assert verify_dataset(str(tmp_path / "out")).problems == ()


@pytest.mark.parametrize("row", [-1, 8])
def test_a_shard_does_not_answer_for_its_neighbours(dataset, row):
    store = open_store(str(dataset))
    index = read_joint_index(store, load_manifest(store)).shard(1)
    for look_up in (index.key, index.members, index.span):
        with pytest.raises(IndexError, match=f"has 8 samples, and none at {row}"):
            look_up(row)


def test_no_shards_index_can_have_its_name():
    assert not JOINT.endswith(index_name(".tar"))


def rewrite(dataset: Path, change) -> None:
    """Write another joint index, which the manifest describes."""
    manifest = load_manifest(open_store(str(dataset)))
    table = change(pa.ipc.open_stream((dataset / JOINT).read_bytes()).read_all())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    (dataset / JOINT).write_bytes(data)
    (dataset / "dataset.json").write_text(replace(manifest, joint_index_crc32c=crc32c.crc32c(data)).to_json())


def test_verify_finds_one_that_says_something_else(dataset):
    rewrite(dataset, lambda table: table.take(list(range(len(table)))[::-1]))
    (problem,) = verify_dataset(str(dataset)).problems
    assert "does not hold what the indexes of the shards do" in problem.detail


def with_other_counts(table: pa.Table) -> pa.Table:
    numbers = [number + 1 for number in table.column("tokens").to_pylist()]
    return table.set_column(table.schema.get_field_index("tokens"), "tokens", [numbers])


def without_counts(table: pa.Table) -> pa.Table:
    return table.drop_columns(["tokens", "vision_tokens", "vision_patches", "vision_squares"]).replace_schema_metadata()


def counted_by_other_rules(table: pa.Table) -> pa.Table:
    return with_other_counts(table).replace_schema_metadata({"counted_as": "0:of another release"})


def columns_of(dataset: Path, processor=None, **options) -> list[list[float]]:
    datasets, _, _ = open_planner(normalise_sources(str(dataset)), StreamOptions(mode="plain", **options), processor)
    columns = datasets(0, range(25))
    return [getattr(columns, field.name).tolist() for field in fields(columns)]


def test_counts_are_taken_as_they_are_kept_for_the_same_geometry_alone(dataset, processor):
    expected, exact = columns_of(dataset), columns_of(dataset, processor)
    assert expected != exact
    rewrite(dataset, with_other_counts)
    assert columns_of(dataset)[0] == [number + 1 for number in expected[0]]
    assert columns_of(dataset)[1:] == expected[1:]
    assert columns_of(dataset, fps=1.0) == expected  # by a guess each video is the same, but the geometry is another
    assert columns_of(dataset, processor) == exact
    (problem,) = verify_dataset(str(dataset)).problems
    assert "does not hold what the indexes of the shards do" in problem.detail


@pytest.mark.parametrize("change", [without_counts, counted_by_other_rules])
def test_one_of_an_earlier_release_is_counted_anew(dataset, change):
    expected, keys = columns_of(dataset), keys_of(dataset)
    rewrite(dataset, change)
    without_indexes(copy := Path(shutil.copytree(dataset, dataset.with_name("without"))))
    assert columns_of(copy) == expected
    assert keys_of(copy) == keys
    assert verify_dataset(str(dataset)).problems == ()


def test_a_fake_image_is_counted_on_top(dataset, processor, saved_processor):
    recount_dataset(str(dataset), processor=str(saved_processor))
    plain, faked = columns_of(dataset, processor), columns_of(dataset, processor, fake_image=True)
    added = {more - less for less, more in zip(plain[0], faked[0], strict=True)}
    assert len(added) == 2
    assert min(added) == 0


def test_a_recount_writes_it_anew(dataset, saved_processor):
    before = (dataset / JOINT).read_bytes()
    recount_dataset(str(dataset), processor=str(saved_processor))
    assert (dataset / JOINT).read_bytes() != before
    assert_same(dataset)
    assert verify_dataset(str(dataset)).problems == ()


def test_tars_made_elsewhere_get_one(dataset, tmp_path):
    index_tars([f"{dataset}/shard-{{000000..000024}}.tar"], IndexOptions(out=str(tmp_path / "out")))
    assert_same(tmp_path / "out")
    assert len(keys_of(tmp_path / "out")) == 200


def test_one_shard_and_many_samples_get_none(toy_meta, tmp_path, monkeypatch):
    make_shards(toy_meta, tmp_path / "one", samples_per_shard=1000)
    assert not (tmp_path / "one" / JOINT).exists()
    assert load_manifest(open_store(str(tmp_path / "one"))).joint_index_crc32c is None
    monkeypatch.setattr(joint_index, "_MAX_SAMPLES", 100)
    make_shards(toy_meta, tmp_path / "out", samples_per_shard=8)
    assert not (tmp_path / "out" / JOINT).exists()


def test_overwriting_removes_it(dataset, toy_meta):
    (dataset / "dataset.indexes.parquet").write_bytes(b"of the first format")
    make_shards(toy_meta, dataset, samples_per_shard=1000, overwrite=True)
    assert not (dataset / JOINT).exists()
    assert not (dataset / "dataset.indexes.parquet").exists()
    assert verify_dataset(str(dataset)).problems == ()


def test_a_few_shards_of_many_samples_are_read_one_by_one(dataset, monkeypatch):
    """All indexes of a large dataset take longer to read than the ones of a window."""
    monkeypatch.setattr("vlm_stream.stream.datasets._ROWS_PER_INDEX", 1)
    expected = keys_of(dataset)
    (dataset / JOINT).unlink()
    assert keys_of(dataset) == expected
