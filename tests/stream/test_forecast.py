"""A run over a store with a node cache: it tells the cache its plan, and gives the same batches as without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vlm_stream import StreamLoader, VLMStream, make_shards
from vlm_stream.storage import cache_folder
from vlm_stream.storage.foresight import Foresight
from vlm_stream.wds import planned

if TYPE_CHECKING:
    from tests.servers import S3Server


def keys_of(samples: list[Any], _processor: Any) -> dict[str, Any]:
    return {"keys": [sample.key for sample in samples]}


def tables(folder: Path) -> list[Path]:
    return list(cache_folder(str(folder)).glob("*.plan"))


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {"processor": None, "mode": "plain", "epochs": 2, "collate_fn": keys_of, "group_shards": 2}


def test_the_cache_is_told_the_plan_of_a_run_and_of_its_resume(
    tmp_path: Path, toy_meta: Path, s3_server: S3Server, options: dict[str, Any]
) -> None:
    url = s3_server.url("forecast")
    make_shards(toy_meta, url, samples_per_shard=6, store=s3_server.options)
    expected = [batch["keys"] for batch in StreamLoader(url, store=s3_server.options, **options)]
    cached = options | {"store": s3_server.options, "cache_dir": str(tmp_path), "cache_bytes": "1M"}
    loader = StreamLoader(url, **cached)
    found = []
    for batch in loader:
        found.append(batch["keys"])
        if len(found) == 5:
            assert len(tables(tmp_path)) == 1
            known = Foresight(cache_folder(str(tmp_path))).due()
            names = [key.digest.hex() for key in loader.stream.plan().datasets.opened[0].shard_keys()]
            assert all(known.seconds(name) is not None for name in names)
            assert sum(known.seconds(name) == 0 for name in names) >= 2
            break
    state = loader.state_dict()
    loader.close()
    assert not tables(tmp_path)
    resumed = StreamLoader(url, **cached)
    resumed.load_state_dict(state)
    assert found + [batch["keys"] for batch in resumed] == expected
    assert not tables(tmp_path)
    numbers = resumed.metrics()
    assert numbers["cache_downloads"] > 0
    assert numbers["cache_hits"] > 0


def test_a_further_round_finds_in_the_cache_what_it_needs_first(
    tmp_path: Path, toy_meta: Path, s3_server: S3Server, options: dict[str, Any]
) -> None:
    """A loop over epochs iterates again for each: what the next one needs is not taken for needed no more."""
    url = s3_server.url("forecast-rounds")
    make_shards(toy_meta, url, samples_per_shard=6, store=s3_server.options)
    cached = {"store": s3_server.options, "cache_dir": str(tmp_path), "cache_bytes": "1M", "group_shards": 1}
    loader = StreamLoader(url, **options | cached | {"epochs": 1})
    for _ in loader:
        due = Foresight(cache_folder(str(tmp_path))).due()
        keys = loader.stream.plan().datasets.opened[0].shard_keys()
        seconds = [due.seconds(key.digest.hex()) for key in keys]
        assert all(each is not None and each < float("inf") for each in seconds)
    loader.close()


@pytest.mark.parametrize("open_run", [VLMStream, planned])
def test_streams_of_other_loaders_tell_their_plan_too(
    tmp_path: Path, toy_meta: Path, s3_server: S3Server, open_run: Any
) -> None:
    url = s3_server.url(f"forecast-{open_run.__name__}")
    make_shards(toy_meta, url, samples_per_shard=30, store=s3_server.options)
    cached: dict[str, Any] = {"store": s3_server.options, "cache_dir": str(tmp_path), "cache_bytes": "1M"}
    own = {"processor": None, "mode": "plain", "collate_fn": keys_of} if open_run is VLMStream else {}
    iterator = iter(open_run(url, **own, **cached))
    next(iterator)
    assert len(tables(tmp_path)) == 1
    assert len(list(iterator)) == 59
    assert not tables(tmp_path)


def test_a_table_is_written_again_before_it_ends(
    tmp_path: Path, toy_meta: Path, s3_server: S3Server, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_stream.forecast._MOST_USES", 4)
    monkeypatch.setattr("vlm_stream.forecast._MOVE_S", 0.0)
    url = s3_server.url("forecast-again")
    make_shards(toy_meta, url, samples_per_shard=6, store=s3_server.options)
    cached = options | {"store": s3_server.options, "cache_dir": str(tmp_path), "cache_bytes": "1M"}
    expected = [batch["keys"] for batch in StreamLoader(url, store=s3_server.options, **options)]
    names, found = set(), []
    for batch in StreamLoader(url, **cached):
        found.append(batch["keys"])
        names |= {path.name for path in tables(tmp_path)}
        assert len(tables(tmp_path)) == 1
    assert found == expected
    assert len(names) > 2
    assert not tables(tmp_path)


def test_a_table_that_cannot_be_written_again_costs_no_batch(
    tmp_path: Path,
    toy_meta: Path,
    s3_server: S3Server,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("vlm_stream.forecast._MOST_USES", 4)
    monkeypatch.setattr("vlm_stream.forecast._MOVE_S", 0.0)
    url = s3_server.url("forecast-full")
    make_shards(toy_meta, url, samples_per_shard=6, store=s3_server.options)
    cached = options | {"store": s3_server.options, "cache_dir": str(tmp_path / "cache"), "cache_bytes": "1M"}
    found = []
    for batch in StreamLoader(url, **cached):
        found.append(batch["keys"])
        if len(found) == 1:  # the folder is gone, and a file is in its place
            (tmp_path / "cache").rename(tmp_path / "gone")
            (tmp_path / "cache").touch()
    assert len(found) == 120
    assert caplog.text.count("what will be read cannot be told to the node cache") == 1


def test_entries_of_one_dataset_have_their_shards_in_common(
    tmp_path: Path, toy_meta: Path, s3_server: S3Server, options: dict[str, Any]
) -> None:
    url = s3_server.url("forecast-entries")
    make_shards(toy_meta, url, samples_per_shard=20, shuffle=3, store=s3_server.options)
    cached = {"store": s3_server.options, "cache_dir": str(tmp_path), "cache_bytes": "1M"}
    weighed = {"url": url, "weights": {"captions": 2, "clips": 1, "dialogues": 1}}
    loader = StreamLoader(weighed, **options | cached | {"epochs": 1})
    iterator = iter(loader)
    next(iterator)
    due = Foresight(cache_folder(str(tmp_path))).due()
    (dataset, *_) = loader.stream.plan().datasets.opened
    assert [due.seconds(key.digest.hex()) for key in dataset.shard_keys()] == [0.0] * 3  # of one group, in use
    loader.close()


def test_a_cache_that_cannot_be_told_serves_all_the_same(
    tmp_path: Path, toy_meta: Path, s3_server: S3Server, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    url = s3_server.url("forecast-unheard")
    make_shards(toy_meta, url, samples_per_shard=30, store=s3_server.options)
    (tmp_path / "file").touch()
    cached = options | {"store": s3_server.options, "cache_dir": str(tmp_path / "file"), "cache_bytes": "1M"}
    assert len(list(StreamLoader(url, **cached))) == 120
    assert "what will be read cannot be told to the node cache" in caplog.text
