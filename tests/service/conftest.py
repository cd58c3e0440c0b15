"""A Ray cluster of real raylets on this machine, on loopback alone, and what its tests share.

Not on 127.0.0.1, which Ray takes for the address of the network.
"""

import gc
import json
import time
import warnings
from pathlib import Path

import pytest
import torch

from vlm_stream import StreamLoader
from vlm_stream.cli import main

NODE = {"num_cpus": 4, "object_store_memory": 200 << 20, "node_ip_address": "127.0.0.2"}
PACKED = {"pack_size": 1024, "with_refs": True}


def pytest_collection_modifyitems(items):
    """Blame no test of this folder for pipes of its processes that Ray leaves to be collected."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*_io.FileIO:pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="module")
def cluster():
    """Yield a cluster of one node, to which tests add others; this process is connected to it."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    # A node that is killed is noticed in seconds; one that only answers late, on a busy machine, is not given up. Nor
    # is anything ended because other programs take much memory.
    health = {
        "health_check_period_ms": 1000,
        "health_check_timeout_ms": 300_000,
        "gcs_rpc_server_reconnect_timeout_s": 600,
        "worker_register_timeout_seconds": 300,
        "memory_monitor_refresh_ms": 0,
    }
    head = {"include_dashboard": False, "_system_config": health, **NODE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(
        address=cluster.address,
        _node_ip_address=NODE["node_ip_address"],
        namespace="vlm_stream",
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield cluster
    with warnings.catch_warnings():  # Ray leaves pipes of its processes open, and no test is to be blamed
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        cluster.shutdown()
        del cluster
        gc.collect()


@pytest.fixture(scope="module")
def pool(cluster):
    """Two builders that the tests share: starting one takes seconds."""
    assert main(["builders", "up", "--name", "test", "--count", "2", "--num-cpus", "0.5", "--address", "auto"]) == 0
    yield {"pool": "test", "local": 0}
    main(["builders", "down", "--name", "test"])


def same(left, right):
    """Compare two values in every part."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def keys_after_a_while(rows, _processor):
    time.sleep(0.03)
    return {"keys": [row.key for row in rows]}


def raw_loader(shards, **options):
    """Return a loader whose batches are names, after a while."""
    return StreamLoader(shards, processor=None, mode="plain", collate_fn=keys_after_a_while, **options)


def last_json(capsys):
    """Return what a command printed last: Ray may have printed something before."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def actor_pids(loader):
    """Return the processes of the builders on Ray of a loader that runs."""
    pool = loader._dispatcher._pool
    pool = getattr(pool, "_pool", pool)  # behind the one that shares batches
    return [remote.place.pid for remote in list(pool._remotes.values()) if remote.place is not None]
