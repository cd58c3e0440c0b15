"""Named pools: several runs on the same builders, which belong to no process."""

import itertools
import os
import signal
from unittest.mock import Mock

import pytest

from tests.service.conftest import actor_pids, last_json, raw_loader
from tests.waiting import wait_for
from vlm_stream.cli import main
from vlm_stream.dispatch import builder_names
from vlm_stream.dispatch.ray_cluster import find_keeper
from vlm_stream.errors import ConfigError


def names(pool):
    """Return the names of a pool's builders."""
    import ray

    return set(builder_names(ray, pool))


def test_runs_of_a_named_pool_share_builders_and_batches(pool, nothing_is_late, toy_shards, capsys):
    expected = [batch["keys"] for batch in raw_loader(toy_shards)]
    before = sum(row["built"] for row in pool_rows(capsys))
    first, second = raw_loader(toy_shards, builders=pool), raw_loader(toy_shards, builders=pool)
    pairs = list(zip(first, second, strict=True))
    assert [[one["keys"], two["keys"]] for one, two in pairs] == [[each] * 2 for each in expected]
    rows = pool_rows(capsys)
    assert [row["node"] for row in rows] == ["127.0.0.2"] * 2
    assert sum(row["built"] for row in rows) - before == len(expected)
    with pytest.raises(ConfigError, match=r"those of the pool 'test'.*vlm-stream builders up --name test --count 3"):
        first.set_workers(3)


def pool_rows(capsys, name="test"):
    """Return what the builders of a pool say of themselves, once all of them answer."""
    rows = []

    def all_answer():
        capsys.readouterr()
        assert main(["builders", "status", "--name", name, "--json"]) == 0
        rows[:] = last_json(capsys)["builders"]
        return all("built" in row for row in rows)

    wait_for(all_answer)
    return rows


def test_a_pool_is_resized_shown_and_ended(cluster, capsys, monkeypatch):
    up = ["builders", "up", "--name", "other", "--num-cpus", "0", "--count"]
    assert main([*up, "1"]) == 0
    assert main([*up, "2"]) == 0
    assert "has 2 builders, 1 before" in capsys.readouterr().out
    first = names("other")
    assert main([*up, "1"]) == 0
    wait_for(lambda: len(names("other")) == 1)
    assert names("other") < first
    assert main([*up, "2", "--num-cpus", "0.25"]) == 0  # it asks something else
    wait_for(lambda: len(names("other")) == 2 and not names("other") & first)
    pool_rows(capsys, "other")
    assert main(["builders", "status", "--name", "other"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("built", "failed", "helped", "waited", "127.0.0.2"))
    sleep = Mock(side_effect=[None, KeyboardInterrupt])
    monkeypatch.setattr("vlm_stream.commands.builders.time", Mock(sleep=sleep))
    assert main(["builders", "status", "--name", "other", "--watch"]) == 0
    assert "127.0.0.2" in capsys.readouterr().out
    assert main(["builders", "down", "--name", "other"]) == 0
    assert main(["builders", "status", "--name", "other"]) == 2
    assert "no pool 'other'" in capsys.readouterr().err


@pytest.mark.slow
def test_many_ranks_use_one_pool_and_none_is_forgotten(pool, nothing_is_late, toy_shards):
    ranks = [{"rank": rank, "world_size": 12, "epochs": 2} for rank in range(12)]
    expected = [[batch["keys"] for batch in raw_loader(toy_shards, **rank)] for rank in ranks]
    loaders = [raw_loader(toy_shards, builders=pool, **rank) for rank in ranks]
    found = list(zip(*loaders, strict=True))  # one batch of each rank after the other, as trainers in step do
    assert [[batch["keys"] for batch in batches] for batches in zip(*found, strict=True)] == expected
    assert [loader.metrics()["worker_restarts"] for loader in loaders] == [0] * len(ranks)


def keeper_pid(pool):
    """Return the process of a pool's keeper; None: it does not answer."""
    import ray

    try:
        return ray.get(find_keeper(ray, pool).pid.remote())
    except (ray.exceptions.RayError, ConfigError):
        return None


def test_a_pool_outlives_its_keeper_and_runs_find_it_again(cluster, toy_shards, capsys):
    up = ["builders", "up", "--name", "kept", "--num-cpus", "0.25"]
    assert main([*up, "--count", "1", "--min-count", "1", "--max-count", "3"]) == 0
    assert main([*up, "--count", "2", "--min-count", "2", "--max-count", "3"]) == 0  # so that it does not shrink
    before, pid = names("kept"), keeper_pid("kept")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: keeper_pid("kept") not in (None, pid))
    assert names("kept") == before
    expected = [batch["keys"] for batch in raw_loader(toy_shards)]
    loader = raw_loader(toy_shards, builders={"pool": "kept", "local": 0})
    batches = iter(loader)
    found = [batch["keys"] for batch in itertools.islice(batches, 5)]
    wait_for(lambda: len(actor_pids(loader)) == 2)
    os.kill(actor_pids(loader)[0], signal.SIGKILL)  # Ray starts it again
    found += [batch["keys"] for batch in itertools.islice(batches, 10)]
    assert main(["builders", "down", "--name", "kept"]) == 0
    wait_for(lambda: not actor_pids(loader))
    assert main([*up, "--count", "1"]) == 0
    found += [batch["keys"] for batch in batches]
    assert found == expected
    assert main([*up, "--count", "9", "--max-count", "3"]) == 2
    assert "count is 9, which is not between min_count (9) and max_count (3)" in capsys.readouterr().err
    main(["builders", "down", "--name", "kept"])
