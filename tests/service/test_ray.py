"""Builders on Ray: the same batches in the same order, whoever builds them and whatever is lost."""

import itertools
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from tests.service.conftest import NODE, PACKED, actor_pids, last_json, raw_loader, same
from tests.waiting import wait_for
from vlm_stream import RayBuilders, StreamLoader, blocks
from vlm_stream.cli import main
from vlm_stream.dispatch import RayPool, parcel, ray_pool
from vlm_stream.dispatch.pool import Finished
from vlm_stream.testing import build_processor


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("internvl", "llava_onevision"))]
)
def test_families_mixtures_and_pipelines_are_equal_to_the_bit(pool, toy_shards, image_shards, family):
    processor = build_processor(family)
    sources = {"a": {"url": str(toy_shards), "weight": 2}, "b": {"url": str(image_shards), "weight": 1}}
    options = {"processor": processor, "bad_budget": None, "with_refs": True, "pack_size": 4096}
    options |= {"pp_microbatches": 2, "batch_size": 2, "pixels": "compact"} if family == "qwen3_vl" else {}
    options |= {"pack_size": None, "mode": "plain", "batch_size": 2} if family == "llava_onevision" else {}
    expected = list(itertools.islice(StreamLoader(sources, **options), 6))
    with StreamLoader(sources, builders=pool, **options) as loader:
        found = list(itertools.islice(loader, 6))
    assert len(found) > 3
    assert same([dict(batch) for batch in found], [dict(batch) for batch in expected])


def test_a_batch_that_was_dropped_may_be_given_again(pool, toy_shards):
    """The answer to what was dropped must not be taken for that of what was given since."""
    stream = raw_loader(toy_shards).stream
    plan, events = stream.plan(), queue.SimpleQueue()
    first, second = (planned.blueprint for planned in itertools.islice(plan.blueprints(stream.world), 2))
    builders = RayPool(plan.build, events.put, RayBuilders(**pool))
    joined = events.get(timeout=240)
    for _ in range(10):
        builders.give(joined.builder, 0, first, {})
        builders.give(joined.builder, 1, second, {})
        builders.drop(joined.builder, 1)
        builders.give(joined.builder, 1, second, {})
        numbers = set()
        while numbers != {0, 1}:
            event = events.get(timeout=240)
            numbers |= {event.number} if isinstance(event, Finished) else set()
    builders.close()


def is_in(file, tensor):
    """Tell whether a tensor's memory is that of a file of this name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(text, 16) for text in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return file in line
    return False


@pytest.mark.parametrize("file", ["memfd:vlm-stream", "plasma"])
def test_batches_are_read_in_place_and_may_be_written(cluster, toy_shards, processor, monkeypatch, file):
    """From a builder on this machine, and from one elsewhere by the object store."""
    if file == "plasma":
        monkeypatch.setattr(blocks, "find_realm", lambda: "elsewhere")
    listening = num_listening(os.getpid())
    expected = list(StreamLoader(toy_shards, processor=processor, **PACKED))
    builders = RayBuilders(count=1, num_cpus=0.5, local=0)
    loader = StreamLoader(toy_shards, processor=processor, builders=builders, **PACKED)
    num_in_place, kept = 0, []
    for batch, other in zip(loader, expected, strict=True):
        num_in_place += is_in(file, batch["pixel_values"])
        assert same(dict(batch), dict(other))
        batch["pixel_values"] += 1
        kept += [(batch, other)] if len(kept) < 3 else []
        assert all(torch.equal(one["pixel_values"], two["pixel_values"] + 1) for one, two in [*kept, (batch, other)])
        (row,) = loader.builders()
        assert (row["node"], row["kind"]) == ("127.0.0.2", "usual")
        (pid,) = actor_pids(loader)
        assert num_listening(pid) == num_listening(actor_of_nothing(cluster))
        assert num_listening(os.getpid()) == listening
    assert num_in_place > len(expected) / 2  # Ray sends small batches with its answer


def test_a_batch_that_its_builder_takes_along_is_built_again(cluster, toy_shards, processor, monkeypatch, caplog):
    expected = list(StreamLoader(toy_shards, processor=processor, **PACKED))
    builders = RayBuilders(count=1, num_cpus=0.5, local=0)
    loader = StreamLoader(toy_shards, processor=processor, builders=builders, **PACKED)
    ended = []

    def unpack_too_late(*arguments, **options):
        if not ended:
            ended.extend(actor_pids(loader))
            os.kill(ended[0], signal.SIGKILL)
            wait_for(lambda: not Path(f"/proc/{ended[0]}/fd/0").exists())
        return parcel.unpack(*arguments, **options)

    monkeypatch.setattr(ray_pool, "unpack", unpack_too_late)
    assert same([dict(batch) for batch in loader], [dict(batch) for batch in expected])
    assert "with a batch that was to be read" in caplog.text


def num_listening(pid):
    return sum(each.status == psutil.CONN_LISTEN for each in psutil.Process(pid).net_connections())


_nothing = []


def actor_of_nothing(cluster):
    """Return the process of an actor with no code of ours."""
    import ray

    if not _nothing:
        actor = ray.remote(num_cpus=0)(type("Nothing", (), {"pid": lambda self: os.getpid()})).remote()
        _nothing.extend((ray.get(actor.pid.remote()), actor))
    return _nothing[0]


def test_lost_actors_and_nodes_lose_no_batch(cluster, toy_shards, caplog):
    expected = [batch["keys"] for batch in raw_loader(toy_shards, epochs=2)]
    spot = cluster.add_node(**NODE, resources={"spot": 2})
    builders = RayBuilders(count=2, num_cpus=0.5, resources={"spot": 1}, local=1)
    loader = raw_loader(toy_shards, epochs=2, builders=builders)
    found = []
    for batch in loader:
        found.append(batch["keys"])
        if len(found) == 20:
            wait_for(lambda: len(actor_pids(loader)) == 2)
            before = set(actor_pids(loader))
            os.kill(min(before), signal.SIGKILL)
            wait_for(lambda before=before: min(before) not in actor_pids(loader))
        if len(found) == 60:
            cluster.remove_node(spot, allow_graceful=False)
            # Now there is nobody but the process here, and the dispatcher knows it.
            wait_for(lambda: not actor_pids(loader) and loader.metrics()["worker_restarts"] >= 2)
    assert found == expected
    assert loader.metrics()["worker_restarts"] >= 2
    assert "others build its batches" in caplog.text


def test_peers_on_a_cluster_build_each_batch_once(cluster, nothing_is_late, toy_shards, saved_processor):
    options = {"processor": str(saved_processor), "peers": 2, "rank": 0, "world_size": 1, **PACKED}
    expected = [dict(batch) for batch in StreamLoader(toy_shards, processor=str(saved_processor), **PACKED)]
    builders = {"count": 1, "num_cpus": 0.5, "local": 0}
    first, second = (StreamLoader(toy_shards, builders=builders, **options) for _ in range(2))
    for number, (one, two) in enumerate(zip(first, second, strict=True)):
        one["pixel_values"] += 1  # what a peer does to its batch is its own affair
        two["pixel_values"] -= 1
        assert torch.equal(one["pixel_values"], expected[number]["pixel_values"] + 1)
        assert torch.equal(two["pixel_values"], expected[number]["pixel_values"] - 1)
        assert torch.equal(one["input_ids"], two["input_ids"])
    taken = first.metrics()["built_by_peers"] + second.metrics()["built_by_peers"]
    assert taken == len(expected)


def test_a_recipe_and_the_command_line_name_builders(pool, tmp_path, toy_shards, saved_processor, capsys):
    recipe = {"sources": str(toy_shards), "processor": str(saved_processor), "pack_size": 1024, "builders": pool}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["bench", str(tmp_path / "recipe.yaml"), "--batches", "3", "--json"]) == 0
    assert last_json(capsys)["bytes_built"] > 0
    command = ["bench", str(toy_shards), "--processor", str(saved_processor), "--pack-size", "1024", "--batches", "2"]
    assert main([*command, "--json", "--set", "builders={pool: nobody}"]) == 2
    assert "no pool 'nobody'" in capsys.readouterr().err


def test_what_is_secret_is_in_no_log_and_no_name(pool, toy_shards, saved_processor):
    import ray

    secret = "hf_" + "s3cret" * 4
    options = {"processor": {"name": str(saved_processor), "token": secret}, "builders": pool, **PACKED}
    with StreamLoader(toy_shards, **options) as loader:
        next(iter(loader))
    assert secret not in str(ray.util.list_named_actors(all_namespaces=True))
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_a_cluster_that_is_not_there_is_said(toy_shards):
    code = (
        "from vlm_stream import StreamLoader\n"
        f"list(StreamLoader({str(toy_shards)!r}, processor=None, mode='plain', builders={{'address': '127.0.0.3:1'}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "no Ray cluster answers at 127.0.0.3:1" in done.stderr
