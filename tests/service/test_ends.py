"""What ends on a Ray cluster while other things go on: runs, actors, objects, connections."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.service.conftest import raw_loader
from tests.service.jobs import RayNumbers, dispatch_on_ray
from tests.waiting import wait_for
from vlm_stream import RayBuilders
from vlm_stream.dispatch import RayBoard, RayPool, ray_cluster
from vlm_stream.dispatch.pool import Finished
from vlm_stream.dispatch.ray_cluster import new_builder_name, start_builder


@pytest.fixture
def start_guest(cluster):
    """Start builders of named pools without a keeper; all are ended with the test."""
    import ray

    actors = []

    def start(pool):
        options = RayBuilders(pool=pool, num_cpus=0.5, local=0)
        actors.append(start_builder(ray, options, name=new_builder_name(options)))
        ray.get(actors[-1].status.remote(), timeout=300)
        return options

    yield start
    for actor in actors:
        ray.kill(actor)


def test_runs_that_end_leave_nothing_at_a_named_pool_and_nothing_here(start_guest, nothing_is_late, monkeypatch):
    monkeypatch.setattr(ray_cluster, "CALLS", 6)
    options = start_guest("few-calls")
    gone = []
    for _ in range(10):
        dispatcher = dispatch_on_ray(RayNumbers(), options, 3)
        gone.append(weakref.ref(dispatcher._pool))
        wait_for(lambda dispatcher=dispatcher: dispatcher.num_ready() == 3)  # it would wait for ever
        assert [delivery.batch["number"] for _, delivery in dispatcher] == [0, 1, 2]
        assert dispatcher.num_restarts == 0
        dispatcher.close()
        del dispatcher

    def all_are_gone():
        gc.collect()
        return not any(each() for each in gone)

    wait_for(all_are_gone)


def test_a_board_answers_however_many_wait(cluster):
    import ray

    board = RayBoard(RayBuilders(), "crowded", None)
    assert board.claim("a")
    waits = [board._actor.wait.remote("a") for _ in range(1500)]
    assert ray.get(board._actor.claim.remote("b", "another"), timeout=240)
    result = SimpleNamespace(num_bytes=8, data=torch.arange(1))
    board.post("a", Finished(0, 0, result, 0))
    assert {len(refs or ()) for refs in ray.get(waits, timeout=240)} == {1}
    board.close()


def test_a_stopped_builder_costs_no_batch(cluster):
    builders = RayBuilders(count=2, num_cpus=0.5, local=0)
    dispatcher = dispatch_on_ray(RayNumbers(seconds=0.02), builders, 200)
    found = [next(dispatcher)[1].batch for _ in range(10)]
    wait_for(lambda: len(dispatcher.builders()) == 2)
    pid = next(remote.place.pid for remote in dispatcher._pool._remotes.values())
    os.kill(pid, signal.SIGSTOP)
    try:
        found += [delivery.batch for _, delivery in dispatcher]
    finally:
        dispatcher.close()  # which ends it, stopped as it is
    assert [batch["number"] for batch in found] == list(range(200))
    assert dispatcher.counts()["built_twice"] >= 1
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def lose_object():
    """Return what stands for an object that the cluster has lost: whoever had it is gone."""
    import ray

    owner = ray.remote(num_cpus=0)(type("Owner", (), {"put": lambda self: [ray.put(bytes(1 << 20))]})).remote()
    (lost,) = ray.get(owner.put.remote(), timeout=240)
    ray.kill(owner)

    def is_lost():
        try:
            return ray.get(lost, timeout=10) is None
        except ray.exceptions.ObjectLostError:
            return True
        except ray.exceptions.GetTimeoutError:
            return False

    wait_for(is_lost)
    return lost


def test_a_lost_object_is_a_batch_that_is_built_again(cluster, nothing_is_late, monkeypatch):
    ask, lost = RayPool._ask, [lose_object()]

    def ask_and_lose_the_first_batch(self, builder, method, *arguments):
        answer = ask(self, builder, method, *arguments)
        return lost.pop() if method == "build" and lost else answer

    monkeypatch.setattr(RayPool, "_ask", ask_and_lose_the_first_batch)
    dispatcher = dispatch_on_ray(RayNumbers(), RayBuilders(count=1, num_cpus=0.5, local=0), 12)
    found = [delivery.batch["number"] for _, delivery in dispatcher]
    dispatcher.close()
    assert found == list(range(12))
    assert dispatcher.num_restarts == 1


@pytest.mark.slow
def test_builders_on_ray_go_on_from_a_state_of_local_workers(cluster, toy_shards):
    expected = [batch["keys"] for batch in raw_loader(toy_shards)]
    with raw_loader(toy_shards, num_workers=1) as loader:
        found = [batch["keys"] for batch in itertools.islice(loader, 7)]
        state = loader.state_dict()
    with raw_loader(toy_shards, builders={"count": 1, "num_cpus": 0.5, "local": 0}) as loader:
        loader.load_state_dict(state)
        found += [batch["keys"] for batch in itertools.islice(loader, 7)]
        state = loader.state_dict()
    rest = raw_loader(toy_shards)  # and back, without any builders
    rest.load_state_dict(state)
    assert found + [batch["keys"] for batch in rest] == expected


def test_a_process_that_leaves_the_cluster_goes_on_with_its_reserve(cluster):
    command = [sys.executable, "-m", "tests.service.leaver", cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout.endswith("all came\n"), done.stderr
