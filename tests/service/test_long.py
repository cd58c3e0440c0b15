"""The service over longer runs: builders that come and go, random kills, real peers, Ray Train.

What takes longest is marked as slow, for `make service`.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks.ray_kills import run_kills
from tests.service.conftest import PACKED, actor_pids, raw_loader, same
from tests.service.jobs import RayNumbers, dispatch_on_ray
from tests.waiting import WAIT_S, wait_for
from vlm_stream import RayBuilders, StreamLoader
from vlm_stream.cli import main
from vlm_stream.dispatch import RayBoard, builder_names
from vlm_stream.dispatch.ray_board import _SILENT_S


@pytest.mark.slow
def test_random_kills_of_builders_nodes_and_trainers(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    found = run_kills(tmp_path, 16)
    assert found["differing"] == 0
    assert all(found["kills"].values())


def test_builders_come_and_go_while_running(cluster, nothing_is_late, toy_shards):
    expected = [batch["keys"] for batch in raw_loader(toy_shards, epochs=4)]
    loader = raw_loader(toy_shards, epochs=4, builders=RayBuilders(count=2, num_cpus=0.5, local=1))
    found = []
    changes = {40: 6, 80: 1, 120: 0, 160: 3}
    for batch in loader:
        found.append(batch["keys"])
        if len(found) in changes:
            wanted = changes[len(found)]
            loader.set_workers(wanted)
            wait_for(lambda wanted=wanted: len(actor_pids(loader)) == wanted)
    assert found == expected
    assert loader.metrics()["worker_restarts"] == 0


@pytest.mark.slow
def test_builders_follow_the_trainers_waiting(cluster, toy_shards, monkeypatch):
    monkeypatch.setattr("vlm_stream.dispatch.team._PERIOD_S", 0.5)
    builders = RayBuilders(count=1, min_count=1, max_count=3, num_cpus=0.5, local=0)
    loader = raw_loader(toy_shards, epochs=None, builders=builders)
    with loader:
        batches = iter(loader)
        next(batches)  # there are no builders before

        def takes_until(num_builders, own_s):
            """Take batches, each after some time of its own, until there are so many builders."""
            end = time.monotonic() + WAIT_S
            while len(actor_pids(loader)) != num_builders:
                assert time.monotonic() < end, "they do not follow"
                time.sleep(own_s)
                next(batches)

        takes_until(3, own_s=0.0)  # it does nothing but wait
        takes_until(1, own_s=0.15)


def run_peers(tmp_path, shards, processor, builders, num_peers=2):
    """Run tensor-parallel peers to the end; return what each was given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = [sys.executable, "-m", "tests.service.peer", shards, processor, tmp_path, builders]
    peers = [
        subprocess.Popen(
            run,
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_peers), "RANK": str(rank)},
        )
        for rank in range(num_peers)
    ]
    assert [peer.wait(timeout=300) for peer in peers] == [0] * num_peers
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_peers)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "ray"])
def test_tensor_parallel_trainers_build_each_batch_once(request, tmp_path, toy_shards, saved_processor, kind):
    builders = kind if kind == "processes" else request.getfixturevalue("cluster").address
    expected = list(StreamLoader(toy_shards, processor=str(saved_processor), **PACKED))
    peers = run_peers(tmp_path, toy_shards, saved_processor, builders)
    for peer in peers:
        assert same(peer["batches"], [dict(batch) for batch in expected])
        assert peer["state"] == peers[0]["state"]
    built, taken = (sum(peer[name] for peer in peers) for name in ("built", "taken"))
    sys.stdout.write(f"{kind}: {built} built for {2 * len(expected)} delivered, {taken} taken from peers\n")
    assert (built, taken) == (len(expected), len(expected))
    assert not list(Path("/dev/shm").glob("vlm-stream-boards-*/*"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_ranks_of_ray_train_use_builders_on_its_cluster(cluster, tmp_path, toy_shards):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def train(config):
        loader = raw_loader(config["shards"], builders={"count": 1, "num_cpus": 0.5, "local": 0})
        keys = [batch["keys"] for batch in loader]
        path = Path(config["out"]) / f"{loader.world.rank}.json"
        path.write_text(json.dumps([loader.world.told_by, loader.world.size, keys]))

    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    trainer = TorchTrainer(
        train,
        train_loop_config={"shards": str(toy_shards), "out": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name="service", storage_path=str(tmp_path / "ray")),
    )
    trainer.fit()
    for rank in range(2):
        told_by, size, keys = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = [batch["keys"] for batch in raw_loader(toy_shards, rank=rank, world_size=2)]
        assert (told_by in ("torch.distributed", "Ray Train"), size, keys) == (True, 2, expected)


@pytest.mark.slow
def test_claims_of_a_loader_that_builds_for_long_are_its_own(cluster, nothing_is_late):
    one, other = (RayBoard(RayBuilders(), "long", 2) for _ in range(2))
    assert one.claim("a")
    end = time.monotonic() + 2 * _SILENT_S
    while time.monotonic() < end:  # it builds, and says nothing else
        time.sleep(_SILENT_S / 4)
        assert not other.claim("a")
    one.close()
    wait_for(lambda: other.claim("a"))
    other.close()


@pytest.mark.slow
def test_a_pool_follows_what_its_builders_have_to_do(cluster):
    import ray

    up = ["builders", "up", "--name", "busy", "--num-cpus", "0.25", "--count", "1", "--max-count", "2"]
    assert main(up) == 0
    dispatcher = dispatch_on_ray(RayNumbers(seconds=1.0), RayBuilders(pool="busy", local=0), count=100_000)
    try:
        while len(builder_names(ray, "busy")) == 1:
            next(dispatcher)
    finally:
        dispatcher.close()
    wait_for(lambda: len(builder_names(ray, "busy")) == 1)
    assert main(["builders", "down", "--name", "busy"]) == 0


ALONE = """
import sys
from tests.service.conftest import raw_loader
if __name__ == "__main__":
    found = [batch["keys"] for batch in raw_loader(sys.argv[1], builders="ray")]
    assert found == [batch["keys"] for batch in raw_loader(sys.argv[1])]
    import ray
    print("nodes:", len(ray.nodes()))
"""


@pytest.mark.slow
def test_a_laptop_without_a_cluster_gets_one(toy_shards, tmp_path):
    """No other cluster is found: Ray notes those of a machine in its folder."""
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": folder, "PYTHONPATH": str(Path.cwd())}
    run = [sys.executable, str(script), str(toy_shards)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=400, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    assert "nodes: 1" in done.stdout, done.stderr
