"""An opened dataset says what its indexes say, and keeps no more of them than it may."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from vlm_stream.errors import DatasetError
from vlm_stream.format import (
    Drawn,
    IndexCache,
    OpenDataset,
    ShardList,
    Totals,
    load_manifest,
    read_index,
    save_manifest,
)
from vlm_stream.storage import open_store
from vlm_stream.storage.local import LocalStore
from vlm_stream.tokens import MediaColumns


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the objects that local stores were asked for."""
    paths: list[str] = []
    get = LocalStore.get

    def note(store: LocalStore, path: str) -> bytes:
        paths.append(path)
        return get(store, path)

    monkeypatch.setattr(LocalStore, "get", note)
    return paths


def indexes_of(folder: Path) -> list:
    store = open_store(str(folder))
    return [read_index(store, shard) for shard in load_manifest(store).shards]


def opened(folder: Path, max_bytes: int = 128 << 20) -> OpenDataset:
    return OpenDataset(str(folder), None, IndexCache(max_bytes))


def join_columns(parts: list[MediaColumns]) -> MediaColumns:
    def join(name: str) -> np.ndarray | None:
        if name == "video_keyframes":
            return None  # not asked for
        if not name.endswith("_splits"):
            return np.concatenate([getattr(part, name) for part in parts])
        counts = np.concatenate([np.diff(getattr(part, name)) for part in parts])
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])

    return MediaColumns(**{field.name: join(field.name) for field in fields(MediaColumns)})


@pytest.mark.parametrize("max_bytes", [0, 128 << 20])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_media_of_shards_come_one_after_the_other(toy_shards: Path, max_bytes: int, is_drawn: bool) -> None:
    dataset, indexes = opened(toy_shards, max_bytes), indexes_of(toy_shards)
    if is_drawn:
        dataset.draw_many([4, 1], [0, 0])
    order = [4, 0, 1, 5, 2, 3]
    for _ in range(2):
        media = dataset.media(order)
        expected = join_columns([indexes[shard].media for shard in order])
        for name in (field.name for field in fields(media)):
            left, right = getattr(media, name), getattr(expected, name)
            assert np.array_equal(left, right), name
            assert left is None or left.dtype == right.dtype
    assert len(media.video_sizes) > 0


def test_no_shards_have_no_media(toy_shards: Path) -> None:
    media = opened(toy_shards).media([])
    assert (len(media), media.image_splits.tolist()) == (0, [0])


@pytest.mark.parametrize("max_bytes", [0, 1000, 128 << 20])
def test_samples_are_drawn_in_the_order_in_which_they_are_asked_for(toy_shards: Path, max_bytes: int) -> None:
    dataset, indexes = opened(toy_shards, max_bytes), indexes_of(toy_shards)
    shards, rows = [3, 0, 3, 5, 0, 3], [9, 1, 0, 4, 1, 9]
    expected = [
        Drawn(index.key(row), index.span(row), index.sizes(row), index.entry_of(row), index.own_id(row))
        for index, row in zip([indexes[shard] for shard in shards], rows, strict=True)
    ]
    assert dataset.draw_many(shards, rows) == expected
    assert dataset.draw_many(shards, rows) == expected
    assert dataset.draw(3, [9, 0]) == [expected[0], expected[2]]
    assert dataset.draw_many([], []) == []
    with pytest.raises(IndexError, match="has 10 samples, and none at 10"):
        dataset.draw(3, [10])


def test_the_text_of_a_sample_lies_in_one_member(toy_shards: Path) -> None:
    dataset = opened(toy_shards)
    (drawn,) = dataset.draw(0, [3])
    span = dataset.text_span(drawn)
    (member,) = span.members
    assert (member[0], span.crc32c) == ("json", None)
    data = (toy_shards / span.path).read_bytes()[span.offset : span.offset + span.size]
    assert data.startswith(b'{"conversation":')
    assert data.endswith(b"}")
    without = drawn._replace(span=drawn.span._replace(members=drawn.span.members[1:]))
    assert dataset.text_span(without) == without.span


def test_keys_are_found_in_their_shard_alone(toy_shards: Path) -> None:
    dataset = opened(toy_shards)
    (drawn,) = dataset.draw(2, [7])
    assert dataset.find(drawn.key) == [(2, 7)]
    assert dataset.find(drawn.id or "") == [(2, 7)]
    assert dataset.find("nobody") == []


def test_an_index_is_fetched_once_while_it_is_kept(toy_shards: Path, fetched: list[str]) -> None:
    dataset = opened(toy_shards)
    for _ in range(2):
        dataset.media(range(6))
        dataset.draw_many(range(6), [0] * 6)
        dataset.find("nobody")
    assert sorted(fetched) == ["dataset.json", *(f"shard-{number:06d}.index.parquet" for number in range(6))]


def test_what_is_kept_is_bounded_by_bytes_and_the_oldest_goes_first(toy_shards: Path, fetched: list[str]) -> None:
    one = max(path.stat().st_size for path in toy_shards.glob("*.index.parquet"))
    cache = IndexCache(3 * one)
    dataset = OpenDataset(str(toy_shards), None, cache)
    for shard in (0, 1, 2):
        dataset.media([shard])
    dataset.media([0])
    dataset.media([3, 4])
    assert 0 < cache.num_bytes <= 3 * one
    del fetched[:]
    dataset.media([0])
    assert fetched == []
    dataset.media([1])
    assert fetched == ["shard-000001.index.parquet"]
    nothing = IndexCache(0)
    OpenDataset(str(toy_shards), None, nothing).draw_many(range(6), [0] * 6)
    assert nothing.num_bytes == 0


def test_datasets_share_a_cache_and_not_their_indexes(toy_shards: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(toy_shards, tmp_path / "copy"))
    cache = IndexCache()
    (here,), (there,) = (OpenDataset(str(folder), None, cache).draw(0, [0]) for folder in (toy_shards, copy))
    assert (here.key, here.span.offset) == (there.key, there.span.offset)
    assert (here.span.root, there.span.root) == (str(toy_shards), str(copy))


def test_missing_and_foreign_indexes_are_named(toy_shards: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(toy_shards, tmp_path / "copy"))
    (copy / "shard-000001.index.parquet").unlink()
    shutil.copy(copy / "shard-000003.index.parquet", copy / "shard-000002.index.parquet")
    dataset = opened(copy)
    for shards, sentence in (([0, 1], "shard-000001.index.parquet is missing"), ([0, 2], "is not the index that the")):
        with pytest.raises(DatasetError, match=sentence):
            dataset.media(shards)
        with pytest.raises(DatasetError, match=sentence):
            dataset.draw_many(shards, [0, 0])


@pytest.mark.parametrize("max_bytes", [0, 128 << 20])
@pytest.mark.parametrize("shards", ["toy_shards", "mixed_shards"])
def test_a_view_shows_the_samples_of_one_entry_alone(
    shards: str, max_bytes: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(shards)
    dataset, indexes = opened(folder, max_bytes), indexes_of(folder)
    seen = set()
    for entry in ("captions", "clips", "dialogues"):
        view = dataset.view(entry)
        rows = [np.flatnonzero(index.is_of(entry)).tolist() for index in indexes]
        assert view.samples_per_shard == [len(own) for own in rows if own]
        whole = [(index, row) for index, own in zip(indexes, rows, strict=True) for row in own]
        places = [(shard, row) for shard, count in enumerate(view.samples_per_shard) for row in range(count)]
        for _ in range(2):  # from Parquet bytes, then from decoded columns
            media = view.media(range(len(view.samples_per_shard)))
            assert media.text_tokens.tolist() == [index.columns.text_tokens.item(row) for index, row in whole]
            assert np.diff(media.image_splits).tolist() == [len(index.sizes(row).images) for index, row in whole]
            assert media.image_sizes.tolist() == [
                [image.height, image.width] for index, row in whole for image in index.sizes(row).images
            ]
            drawn = view.draw_many(*zip(*places, strict=True))
            assert [(each.key, each.entry) for each in drawn] == [(index.key(row), entry) for index, row in whole]
        assert all(view.find(each.key) == [place] for each, place in zip(drawn, places, strict=True))
        seen |= {each.key for each in drawn}
    assert len(seen) == sum(dataset.samples_per_shard)
    assert len({dataset.digest, *(dataset.view(name).digest for name in ("captions", "clips"))}) == 3


def test_views_keep_an_index_once(mixed_shards: Path, fetched: list[str]) -> None:
    cache = IndexCache()
    dataset = OpenDataset(str(mixed_shards), None, cache)
    views = [dataset.view(entry) for entry in ("captions", "dialogues")]
    views[0].media(range(len(views[0].samples_per_shard)))
    num_bytes, num_fetched = cache.num_bytes, len(fetched)
    views[1].media(range(len(views[1].samples_per_shard)))
    assert (cache.num_bytes, len(fetched)) == (num_bytes, num_fetched)


def test_a_manifest_that_counts_entries_wrongly_is_refused(toy_shards: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(toy_shards, tmp_path / "copy"))
    store = open_store(str(copy))
    manifest = load_manifest(store)
    columns = {field.name: manifest.shards.column(field.name) for field in fields(Totals)}
    columns |= {name: manifest.shards.column(name) for name in ("name", "crc32c", "index_sha256", "etag")}
    entries = manifest.shards.entries
    entries["clips"][3] += 1
    entries["dialogues"][3] -= 1
    save_manifest(store, replace(manifest, shards=ShardList(columns, entries)))
    view = opened(copy).view("clips")
    for _ in range(2):
        with pytest.raises(DatasetError, match="samples of 'clips', the manifest says"):
            view.media([0])
        with pytest.raises(DatasetError, match="samples of 'clips', the manifest says"):
            view.draw(0, [0])


@pytest.mark.parametrize("num_bad", [1, 2])
def test_an_index_that_was_flipped_on_its_way_is_read_again(
    toy_shards: Path, monkeypatch: pytest.MonkeyPatch, num_bad: int
) -> None:
    get, seen = LocalStore.get, []

    def flip(store: LocalStore, path: str) -> bytes:
        data = get(store, path)
        if not path.endswith(".index.parquet"):
            return data
        seen.append(path)
        return data if seen.count(path) > num_bad else bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(LocalStore, "get", flip)
    dataset = opened(toy_shards)
    for _ in range(2):  # nothing wrong is kept
        if len(seen) < num_bad and num_bad == 2:
            with pytest.raises(DatasetError, match="is not the index that the manifest describes"):
                dataset.media([0])
        else:
            assert len(dataset.media([0])) == 10
    assert len(dataset.draw(0, [0])) == 1
