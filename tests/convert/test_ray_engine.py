"""Ray gives the same bytes as the local engine, also when one of its workers is killed."""

from __future__ import annotations

import os
import signal
import warnings
from typing import TYPE_CHECKING

import pytest

from vlm_stream.convert import make_shards
from vlm_stream.convert.engines import RayEngine
from vlm_stream.convert.shard_task import ShardContext, write_shard
from vlm_stream.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A real Ray cluster on this machine with two workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20
        )
        yield
        ray.shutdown()


class _DyingOnce:
    """A shard writer that kills its own worker the first time it meets shard 1."""

    def __init__(self, context: ShardContext, flag: Path) -> None:
        self.context = context
        self.flag = flag

    def __call__(self, tasks):
        (task,) = tasks
        if task.number == 1 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [write_shard(self.context, task)]


def test_ray_gives_the_bytes_of_the_local_engine(toy_meta: Path, toy_shards: Path, tmp_path: Path, digests) -> None:
    out = tmp_path / "out"
    report = make_shards(toy_meta, out, samples_per_shard=64, workers=2, engine="ray")
    assert report.totals.samples == 200
    assert digests(out) == digests(toy_shards)


def test_killed_ray_worker_loses_nothing(toy_meta, toy_shards, tmp_path: Path, monkeypatch, digests) -> None:
    run = RayEngine.run
    monkeypatch.setattr(RayEngine, "run", lambda self, f, tasks: run(self, _DyingOnce(f, tmp_path / "flag"), tasks))
    make_shards(toy_meta, tmp_path / "out", samples_per_shard=64, workers=2, engine="ray")
    assert (tmp_path / "flag").exists()
    assert digests(tmp_path / "out") == digests(toy_shards)


def test_errors_of_tasks_come_back_as_themselves(write_jsonl, tmp_path: Path) -> None:
    path = write_jsonl([{"messages": [{"role": "stranger", "content": "hello"}]}])
    with pytest.raises(SourceError, match="stranger"):
        make_shards(path, tmp_path / "out", engine="ray", on_mismatch="raise")


def test_relative_paths_mean_the_same_on_workers(
    toy_meta: Path, toy_shards: Path, tmp_path: Path, monkeypatch, digests
) -> None:
    monkeypatch.chdir(toy_meta.parent)
    make_shards("meta.json", tmp_path / "out", samples_per_shard=64, workers=2, engine="ray")
    assert digests(tmp_path / "out") == digests(toy_shards)
