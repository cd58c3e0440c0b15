"""Builders on Ray: what needs no cluster."""

import asyncio
import itertools
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from tests.service.conftest import raw_loader
from tests.waiting import wait_for
from vlm_stream import RayBuilders
from vlm_stream.dispatch import RayPool, ray_builder, ray_cluster, ray_keeper, ray_pool
from vlm_stream.dispatch.ray_builder import Place, RayBuilder, Shares
from vlm_stream.dispatch.ray_cluster import Guests, no_pool_error, say_error
from vlm_stream.errors import WorkerError
from vlm_stream.metrics import Meter


def test_a_builder_is_found_once_until_it_is_lost_however_busy_its_run_is(monkeypatch):
    looks, found = [], []

    def names(_ray, pool):
        looks.append(pool)
        return ["builder:few:1:2"]

    monkeypatch.setattr(ray_cluster, "has_pool", lambda *_: True)
    monkeypatch.setattr(ray_cluster, "builder_names", names)
    monkeypatch.setattr(ray_cluster, "_LOOK_S", 0.01)
    ray = SimpleNamespace(get_actor=lambda name, namespace: (namespace, name))
    guests = Guests(ray, "few", lambda name, actor: found.append((name, actor)), lambda: True)
    wait_for(lambda: len(looks) > 5)  # whoever was told of it has not taken it in
    assert found == [("builder:few:1:2", ("vlm_stream", "builder:few:1:2"))]
    guests.lose("builder:few:1:2")
    wait_for(lambda: len(found) > 1)
    before = len(looks)
    wait_for(lambda: len(looks) > before + 5)
    assert len(found) == 2
    guests.close()
    guests.join()


def blueprint_of(sizes):
    """Return a blueprint whose only row has so many bytes of each shard."""
    pieces = tuple(SimpleNamespace(span=SimpleNamespace(path=path, size=size)) for path, size in sizes.items())
    return SimpleNamespace(rows=(pieces,))


def test_a_batch_is_near_to_the_machines_that_its_shards_belong_to():
    pool = object.__new__(RayPool)
    pool._guests, pool._report, pool._kill = None, lambda _event: None, lambda _remote: None
    pool._remotes = {
        number: ray_pool._Remote(None, place=Place(node, "127.0.0.2", number)) for number, node in enumerate("aabc")
    }
    pool._note_nodes()
    shards = {f"shard-{number}.tar": number + 1 for number in range(40)}

    def near(builder, sizes=shards):
        return pool._nearness(builder, blueprint_of(sizes))

    for shard in shards:  # each has one machine
        assert sorted(near(builder, {shard: 7}) for builder in (1, 2, 3)) == [0.0, 0.0, 1.0]
    assert near(0) == near(1)
    assert sum(map(near, (1, 2, 3))) == pytest.approx(1.0)
    assert min(map(near, (1, 2, 3))) > 0
    bytes_of_two = {
        builder: {shard: size for shard, size in shards.items() if near(builder, {shard: 1})} for builder in (2, 3)
    }
    assert near(3) == pytest.approx(sum(bytes_of_two[3].values()) / sum(shards.values()))

    pool._lose(3, "is gone")  # its shards move, the others stay
    assert near(3) == 0.0
    assert near(1) + near(2) == pytest.approx(1.0)
    assert near(2, bytes_of_two[2]) == 1.0
    pool._lose(2, "is gone")
    assert near(1) == 0.0  # one machine is as near as itself


def test_errors_of_builders_are_told_without_what_is_secret():
    error = OSError("GET https://me:s3cret@host/a.tar failed\nmore")
    assert say_error(error) == "OSError: GET https://***@host/a.tar failed"
    failure = ray_pool._failure(error)
    assert "s3cret" not in failure.text
    assert "host/a.tar failed" in failure.text


def test_a_builder_helps_only_where_another_one_has_the_batch():
    """A batch that no peer brings is one's own, and no help."""
    pool, asked = object.__new__(RayPool), []
    pool._local, pool._guests, pool._run, pool._tickets = None, None, "run", itertools.count()
    pool._report, pool._kill = lambda _event: None, lambda _remote: None
    pool._remotes = {number: ray_pool._Remote(None) for number in range(3)}
    pool._ask = lambda *call: asked.append((call[0], call[-2]))
    pool.give(0, 5, None, {})
    pool.give(1, 5, None, {})
    pool.give(0, 6, None, {})
    pool._lose(0, "is gone")
    pool.give(2, 6, None, {})
    assert asked == [(0, False), (1, True), (0, False), (2, False)]


def test_what_builders_have_read_is_added_up_though_their_processes_have_one_number(toy_shards):
    """Those of two machines may; so have two configs at one builder on Ray."""
    stream, meter = raw_loader(toy_shards).stream, Meter()
    plan = stream.plan()
    wanted = 0
    for planned in itertools.islice(plan.blueprints(stream.world), 2):
        with plan.build.open() as builder:
            delivery = builder.build(planned.blueprint)
        meter.add(delivery)
        wanted += delivery.reads.bytes_read
    assert meter.numbers()["bytes_read"] == wanted > delivery.reads.bytes_read


def test_builders_keep_what_they_free_unless_the_user_tunes_it():
    asked = []

    def options(**more):
        asked.append(more["runtime_env"])
        return SimpleNamespace(remote=lambda: None)

    ray = SimpleNamespace(remote=lambda _kind: SimpleNamespace(options=options))
    for environment in (None, {"pip": ["av"], "env_vars": {"A": "b"}}, {"env_vars": {"MALLOC_ARENA_MAX": "4"}}):
        ray_cluster.start_builder(ray, RayBuilders(runtime_env=environment))
    assert asked == [
        {"env_vars": {"MALLOC_ARENA_MAX": "1"}},
        {"pip": ["av"], "env_vars": {"MALLOC_ARENA_MAX": "1", "A": "b"}},
        {"env_vars": {"MALLOC_ARENA_MAX": "4"}},
    ]


class Reading:
    is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


class GatedBuilder:
    """Finishes no batch before its gate is opened."""

    def __init__(self):
        self.readings, self.entered, self.gate = [], threading.Event(), threading.Event()

    def begin(self, _blueprint):
        self.readings.append(Reading())
        return self.readings[-1]

    def finish(self, *_arguments):
        self.entered.set()
        assert self.gate.wait(120)
        raise ValueError("nobody wants it")

    def close(self):
        pass


def test_what_waits_for_a_run_that_ends_is_not_read_any_more():
    async def run():
        builder, gated = RayBuilder(), GatedBuilder()
        builder._runs["run"] = ray_builder._Run("key")
        builder._jobs.add("run", 1.0)
        builder._builders["key"] = asyncio.get_running_loop().create_future()
        builder._builders["key"].set_result(gated)
        building, waiting = (asyncio.ensure_future(builder.build("run", each, None, {}, False)) for each in range(2))
        await asyncio.to_thread(gated.entered.wait, 120)
        watching = asyncio.ensure_future(builder.wait("run"))
        await asyncio.sleep(0)
        await builder.close("run")
        assert await waiting is None
        assert await watching is None
        assert [reading.is_cancelled for reading in gated.readings] == [False, True]
        gated.gate.set()
        builder._loop = asyncio.get_running_loop()
        await building

    asyncio.run(run())


def test_a_run_may_change_its_share():
    shares = Shares()
    shares.add("one", 1.0)
    shares.add("other", 1.0)
    shares.add("one", 3.0)
    taken = []
    for number in range(400):
        for run in ("one", "other"):
            shares.put(run, number, number)
    for _ in range(400):
        run, _ = shares.take()
        shares.spend(run, 1.0)
        taken.append(run)
    assert taken.count("one") == 300


class LateCluster:
    """A cluster that does nothing in time."""

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError)

    def remote(self, _actor):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: Mock()))

    def kill(self, _actor):
        pass

    def get(self, _ref, timeout):
        raise TimeoutError(timeout)


def test_a_cluster_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setattr(ray_keeper, "connect", lambda _options: LateCluster())
    monkeypatch.setattr(ray_keeper, "builder_names", lambda *_: [])
    monkeypatch.setattr(ray_keeper, "has_pool", lambda *_: True)
    monkeypatch.setattr(ray_keeper, "_GONE_S", 0.2)
    keepers = ["old"]

    def find(_ray, pool):
        if not keepers:
            raise no_pool_error(pool)
        return keepers[0]

    monkeypatch.setattr(ray_keeper, "find_keeper", find)
    options = RayBuilders(pool="late", count=1)
    for call in (ray_keeper.start_keeper, ray_keeper.end_pool):
        with pytest.raises(
            WorkerError, match=r"the keeper of the pool 'late' has not ended .* so the pool is as it was"
        ):
            call(options)
    keepers.clear()
    with pytest.raises(WorkerError, match=r"has not started the keeper of the pool 'late' within 300 s"):
        ray_keeper.start_keeper(options)


def in_bytes(text):
    return int(text.removesuffix("Gi")) << 30


def test_the_manifest_for_kubernetes_holds_together():
    path = Path(__file__).parents[2] / "examples/kuberay.yaml"
    cluster = yaml.safe_load(path.read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert set(groups) == {"builders", "trainers"}
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in (spec["headGroupSpec"], *groups.values()):
        assert all(
            isinstance(value, str) for value in group["rayStartParams"].values()
        )  # the operator takes text alone
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "IMAGE"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        volumes = {volume["name"]: volume["emptyDir"] for volume in pod.get("volumes", ())}
        mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", ())}
        assert mounts.keys() == volumes.keys()
        assert mounts.get("shm", "/dev/shm") == "/dev/shm"
        if "shm" in volumes:  # memory of the pod, which its limit counts
            assert in_bytes(volumes["shm"]["sizeLimit"]) < in_bytes(container["resources"]["limits"]["memory"])
        group["shm"] = volumes.get("shm")

    builders, trainers = groups["builders"], groups["trainers"]
    resources = json.loads(json.loads(builders["rayStartParams"]["resources"].strip("'")))  # quoted for a shell
    (asked,) = re.findall(r"RayBuilders\(.*\)", path.read_text())
    options = eval(asked, {"RayBuilders": RayBuilders})
    (container,) = builders["template"]["spec"]["containers"]
    assert resources == {"builder": int(container["resources"]["requests"]["cpu"])}
    assert options.resources.keys() == resources.keys()
    assert options.count * options.num_cpus <= resources["builder"] * builders["maxReplicas"]
    assert int(trainers["rayStartParams"]["object-store-memory"]) < in_bytes(trainers["shm"]["sizeLimit"])
