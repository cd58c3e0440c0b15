"""Whoever makes a dataset decides neither how much memory is taken nor which host is asked."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.forge import forge_index, forge_manifest
from vlm_stream.convert import verify_dataset
from vlm_stream.errors import BadSampleError, DatasetError
from vlm_stream.format import IndexCache, Manifest, OpenDataset, index_name, load_manifest, read_index
from vlm_stream.format.table import read_table
from vlm_stream.options import StreamOptions
from vlm_stream.storage import Member, ReadOptions, Span, SpanReader, StoreOptions, open_store, plan_requests


@pytest.fixture
def dataset(toy_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_shards, tmp_path / "copy"))


def shard_column(name: str, value: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        data["shards"][name] = [value, *data["shards"][name][1:]] if isinstance(data["shards"][name], list) else value

    return change


def table_of(dataset: Path, number: int = 0) -> pa.Table:
    return pq.read_table(dataset / f"shard-{number:06d}.index.parquet")


def with_numbers(table: pa.Table, name: str, value: int) -> pa.Table:
    values = [value, *table.column(name).to_pylist()[1:]]
    return table.set_column(
        table.column_names.index(name), name, pa.array(values, table.column(name).type, from_pandas=False)
    )


def test_no_flipped_bit_of_a_manifest_is_taken_for_another_dataset(dataset: Path) -> None:
    text = (dataset / "dataset.json").read_bytes()
    whole = Manifest.from_json(text)
    refused = 0
    places = random.Random(0).sample(range(8 * len(text)), 1500)
    for place in places:
        flipped = bytearray(text)
        flipped[place // 8] ^= 1 << place % 8
        try:
            assert Manifest.from_json(bytes(flipped)) == whole
        except DatasetError:
            refused += 1
    assert refused > 1400  # the others are white space


@pytest.mark.parametrize(
    "change",
    [
        shard_column("samples", -5),
        shard_column("samples", 1 << 62),
        shard_column("samples", 1 << 25),  # more than its bytes have room for
        shard_column("samples", True),
        shard_column("bytes", 1 << 62),
        shard_column("bytes", "9"),
        shard_column("text_tokens", 1 << 62),
        shard_column("text_tokens", 0.5),
        shard_column("video_seconds", float("nan")),
        shard_column("crc32c", 1 << 32),
        shard_column("index_sha256", 1),
        shard_column("etag", [1] * 6),
        shard_column("entries", {"a": [-1] * 6}),
        lambda data: data | {"tars": 3},
        lambda data: data | {"job": None},
        lambda data: data | {"dropped": {"x": -1}},
        lambda data: data | {"dropped": {"x": "\x1b[2J"}},
        lambda data: data | {"tokens": data["tokens"] | {"geometry": []}},
        lambda data: data | {"fields": data["fields"] | {"tags": {"subflavors": 1}}},
    ],
)
def test_forged_manifests_are_refused(dataset: Path, change: Any) -> None:
    forge_manifest(dataset, change)
    with pytest.raises(DatasetError, match=r"lacks or misnames a field|does not have the checksum"):
        load_manifest(open_store(str(dataset)))


@pytest.mark.parametrize("name", ["totals", "tokens", "dropped", "job", "home"])
def test_a_manifest_with_an_edited_value_is_refused(dataset: Path, name: str) -> None:
    data = json.loads((dataset / "dataset.json").read_text())
    data[name] = data[name] + "x" if isinstance(data[name], str) else data[name] | {next(iter(data[name]), "x"): 7}
    (dataset / "dataset.json").write_text(json.dumps(data))
    with pytest.raises(DatasetError, match=r"lacks or misnames a field|does not have the checksum"):
        load_manifest(open_store(str(dataset)))


def test_a_manifest_that_is_nested_without_end_is_refused(dataset: Path) -> None:
    (dataset / "dataset.json").write_text("[" * 200_000)
    with pytest.raises(DatasetError, match="is not JSON"):
        load_manifest(open_store(str(dataset)))


def test_a_forged_geometry_is_refused(dataset: Path) -> None:
    forge_manifest(dataset, lambda data: data | {"tokens": data["tokens"] | {"geometry": {"version": 1, "image": 3}}})
    manifest = load_manifest(open_store(str(dataset)))
    with pytest.raises(Exception, match=r"geometry (in the manifest is damaged|has version)"):
        _ = manifest.geometry


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("offset", -512, "offset is between -512"),
        ("offset", 1 << 62, "offset is between"),
        ("size", -512, "size is between -512"),
        ("size", 1 << 62, "size is between"),
        ("size", 1 << 40, "size is between"),
        ("size", 0, "lies in no sample"),
        ("text_tokens", -7, "text_tokens is between -7"),
        ("label_tokens", -2, "label_tokens is between -2"),
        ("images", [{"height": -1, "width": 1}], "height is between -1"),
        ("images", [{"height": 1 << 30, "width": 1 << 30}], "height is between"),
        ("members", [{"name": "json", "offset": -2, "size": 9}], "a member of 9 bytes at -2 lies in no sample"),
        ("members", [{"name": "json", "offset": 512, "size": 1 << 40}], "lies in no sample"),
        ("members", [{"name": "json", "offset": 512, "size": -1}], "size of a member is between -1"),
    ],
)
def test_places_and_sizes_that_no_shard_has_are_refused(dataset: Path, name: str, value: Any, sentence: str) -> None:
    shard = forge_index(dataset, 0, with_numbers(table_of(dataset), name, value))
    with pytest.raises(DatasetError, match=f"is not an index of this format .*{sentence}"):
        read_index(open_store(str(dataset)), shard)


def bomb(num_rows: int, **columns: Any) -> pa.Table:
    """Return an index whose rows are alike: it is small on disk."""
    member = pa.struct([("name", pa.string()), ("offset", pa.int64()), ("size", pa.int64())])
    size = pa.struct([("height", pa.int32()), ("width", pa.int32())])
    values = {
        "key": pa.array(["a"] * num_rows),
        "id": pa.nulls(num_rows, pa.string()),
        "entry": pa.array(["captions"] * num_rows),
        **{name: pa.array([0] * num_rows, pa.int64()) for name in ("offset", "size")},
        "crc32c": pa.array([0] * num_rows, pa.uint32()),
        **{name: pa.array([0] * num_rows, pa.int32()) for name in ("text_tokens", "label_tokens")},
        "images": pa.array([[]] * num_rows, pa.list_(size)),
        "videos": pa.array([[]] * num_rows, pa.list_(size)),
        "audios": pa.array([[]] * num_rows, pa.list_(size)),
        "members": pa.array([[]] * num_rows, pa.list_(member)),
    }
    return pa.table(values | columns)


def test_texts_of_an_index_are_texts(dataset: Path) -> None:
    table = table_of(dataset)
    splits = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in range(len(table) + 1)))
    keys = pa.StringArray.from_buffers(len(table), splits, pa.py_buffer(b"\xff" * len(table)))
    shard = forge_index(dataset, 0, table.set_column(0, "key", keys))
    with pytest.raises(DatasetError, match=r"is not an index of this format .*UTF"):
        read_index(open_store(str(dataset)), shard)


def many_images() -> pa.Array:
    zeros = pa.array([0], pa.int32()).take(pa.array([0] * 20_000_000, pa.int32()))
    return pa.ListArray.from_arrays(pa.array([0, len(zeros)], pa.int32()), pa.StructArray.from_arrays(
        [zeros, zeros], ["height", "width"]
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "make", "options", "sentence"),
    [
        (10, lambda: bomb(1_000_000), {}, "has 1000000 samples, the manifest says 10"),
        (1_000_000, lambda: bomb(1_000_000), {}, "bytes would take"),
        (1, lambda: bomb(1, key=pa.array(["a" * (200 << 20)])), {"use_dictionary": False}, "bytes would take"),
        (
            20_000,
            lambda: bomb(20_000, key=pa.array(["a" * (1 << 20)]).dictionary_encode().take(pa.array([0] * 20_000))),
            {},
            "bytes would take",
        ),
        (1, lambda: bomb(1, images=many_images()), {}, "bytes would take"),
    ],
    ids=["rows", "named rows", "text", "repeated text", "images"],
)
def test_what_is_small_on_disk_and_large_in_memory_is_refused_before_memory_is_taken(
    dataset: Path, samples: int, make: Any, options: dict[str, Any], sentence: str
) -> None:
    shard = forge_index(dataset, 0, make(), samples=samples, **options)
    data = (dataset / index_name(shard.name)).read_bytes()
    assert len(data) < 4 << 20
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.system_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(DatasetError, match=sentence):
            read_table(data, "index", num_rows=samples)
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 64 << 20
    with pytest.raises(DatasetError, match=sentence):
        read_index(open_store(str(dataset)), shard)


def test_ranges_that_no_shard_has_are_bad_samples(dataset: Path) -> None:
    root, path = str(dataset), "shard-000000.tar"
    places = [(1 << 62, 1), (0, 1 << 62), (0, 1 << 40), (-512, 512), (0, -512), (0, 1 << 35)]
    spans = [Span(root, path, offset, size, None, (Member("json", 512, 1),)) for offset, size in places]
    spans += [Span(root, path, 0, 1024, None, (Member("json", *at),)) for at in ((512, -1), (512, 1 << 40), (-9, 1))]
    assert len(plan_requests(spans, ReadOptions())) < 3000
    with SpanReader() as reader:
        results = reader.begin([*spans, Span(root, path, 0, 1024, None, (Member("json", 512, 1),))]).results()
    assert all(isinstance(result, BadSampleError) for result in results[:-1])
    assert {result.reason for result in results[:-1]} == {"truncated", "member_outside_span"}
    assert len(results[-1]["json"]) == 1


@pytest.mark.parametrize("tars", ["http://127.0.0.1:9/x", "s3://bucket/data", "hf://datasets/a/b", "HTTP://h"])
def test_tars_on_another_host_need_the_users_word(dataset: Path, tars: str) -> None:
    forge_manifest(dataset, lambda data: data | {"tars": tars})
    refused = pytest.raises(DatasetError, match=r"so nothing is read there\. .*name it with --tars URL")
    for named in ((), ("s3://bucket/dat",), ("http://127.0.0.1:90",), ("http://127.0.0.1:9/x/y",)):
        with refused:
            OpenDataset(str(dataset), StoreOptions(tars=named), IndexCache())
    assert OpenDataset(str(dataset), StoreOptions(tars=(tars,)), IndexCache()).manifest.tars == tars


def test_tars_in_another_local_folder_need_the_users_word(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for path in dataset.glob("*.tar"):
        path.rename(tmp_path / "tars" / path.name)
    (dataset / "link").symlink_to(tmp_path / "tars")
    for tars in (tmp_path / "tars", dataset / "link", dataset / ".." / "tars", (tmp_path / "tars").as_uri(), "tars"):
        forge_manifest(dataset, lambda data, tars=tars: data | {"tars": str(tars)})
        with pytest.raises(DatasetError, match=r"so nothing is read there\. .*name it with --tars URL"):
            OpenDataset(str(dataset), None, IndexCache())
    forge_manifest(dataset, lambda data: data | {"tars": str(tmp_path / "tars")})
    for named in (tmp_path / "tars", tmp_path, dataset / "link"):
        options = StoreOptions(tars=(str(named),))
        (drawn,) = OpenDataset(str(dataset), options, IndexCache()).draw(0, [0])
        assert drawn.span.root == str(tmp_path / "tars")


def test_tars_below_the_datasets_own_folder_are_used(dataset: Path, tmp_path: Path) -> None:
    (dataset / "tars").mkdir()
    for path in dataset.glob("*.tar"):
        path.rename(dataset / "tars" / path.name)
    forge_manifest(dataset, lambda data: data | {"tars": str(dataset / "tars")})
    (tmp_path / "way").symlink_to(dataset)
    (drawn,) = OpenDataset(str(tmp_path / "way"), None, IndexCache()).draw(0, [0])
    assert drawn.span.root == str(dataset / "tars")


def forge_member(dataset: Path, url: str, size: int) -> None:
    """Let the first sample have a member that is a file outside of its tar."""
    table = table_of(dataset)
    column = table.column("members")
    members = column.to_pylist()
    members[0].append({"name": url, "offset": -1, "size": size})
    place = table.column_names.index("members")
    forge_index(dataset, 0, table.set_column(place, "members", pa.array(members, column.type)))


@pytest.mark.parametrize("how", ["path", "url", "link", "dots", "no path"])
def test_files_outside_of_the_dataset_need_the_users_word(dataset: Path, tmp_path: Path, how: str) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("of the user")
    (dataset / "link.txt").symlink_to(secret)
    names = {"path": str(secret), "url": secret.as_uri(), "link": f"{dataset}/link.txt", "no path": "/a\0b"}
    forge_member(dataset, names.get(how, f"{dataset}/../secret.txt"), 11)
    opened = OpenDataset(str(dataset), None, IndexCache(1 << 20))
    for _ in range(2):  # an index that was refused is not kept
        with pytest.raises(DatasetError, match="which is not where the dataset lies"):
            opened.draw(0, [0])
    with pytest.raises(DatasetError, match="which is not where the dataset lies"):
        verify_dataset(str(dataset), workers=1)


def test_files_outside_of_tars_are_read_where_the_user_says_so(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    for folder, options in ((dataset, None), (tmp_path / "media", StoreOptions(tars=(str(tmp_path / "media"),)))):
        (folder / "clip.txt").write_text("of the user")
        forge_member(dataset, f"{folder}/clip.txt", 11)
        (drawn,) = OpenDataset(str(dataset), options, IndexCache()).draw(0, [0])
        with SpanReader() as reader:
            found = reader.begin(list(drawn.shared)).results()[-1]
        assert bytes(found[f"{folder}/clip.txt"]) == b"of the user"


@pytest.mark.parametrize(
    "climbing", ["s3://bucket/data/../other", "s3://bucket/data/%2e%2e/x", "s3://bucket/data%2f.."]
)
def test_a_folder_is_not_left_by_dots(dataset: Path, climbing: str) -> None:
    forge_manifest(dataset, lambda data: data | {"tars": climbing})
    with pytest.raises(DatasetError, match="is not where the dataset lies"):
        OpenDataset(str(dataset), StoreOptions(tars=("s3://bucket/data",)), IndexCache())


def test_a_recipe_names_places_of_tars() -> None:
    options = StreamOptions.parse({"store": {"tars": ["s3://bucket/data"]}, "mode": "plain"})
    assert options.store is not None
    assert tuple(options.store.tars) == ("s3://bucket/data",)
