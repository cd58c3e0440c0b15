"""A trainer that leaves the Ray cluster in the middle of its runs: `python -m tests.service.leaver ADDRESS`.

A process of its own, because Ray may end one that comes back to a cluster.
"""

import sys
from types import SimpleNamespace

import pytest
import ray

from tests.service.conftest import NODE
from tests.service.jobs import RayNumbers, dispatch_on_ray
from vlm_stream import RayBuilders
from vlm_stream.dispatch import RayBoard
from vlm_stream.dispatch.pool import Finished
from vlm_stream.errors import WorkerError


def main(address: str) -> None:
    """Take batches by builders of the cluster, leave it, and take the others."""
    ray.init(address=address, _node_ip_address=NODE["node_ip_address"], namespace="vlm_stream", log_to_driver=False)
    alone = dispatch_on_ray(RayNumbers(), RayBuilders(count=1, num_cpus=0.5, local=0), 1000)
    helped = dispatch_on_ray(RayNumbers(size=1 << 20), RayBuilders(count=2, num_cpus=0.5, local=1), 40)
    board = RayBoard(RayBuilders(), "left", 2)
    assert board.claim("a")
    found = [next(helped)[1].batch for _ in range(10)]
    next(alone)
    ray.shutdown()
    found += [delivery.batch for _, delivery in helped]
    assert [batch["number"] for batch in found] == list(range(40))
    assert not any(batch["data"].any() for batch in found)  # what lay in the object store is still there
    with pytest.raises(WorkerError, match=r"this process has left the Ray cluster.*or have a reserve here"):
        for _ in alone:
            pass
    assert board.claim("b")
    assert board.look("c") == "gone"
    board.post("a", Finished(0, 0, SimpleNamespace(num_bytes=8), 0))
    board.release("b")
    for each in (board, helped, alone):
        each.close()
    assert not ray.is_initialized()  # Ray starts a cluster in a process that calls it without one
    sys.stdout.write("all came\n")


if __name__ == "__main__":
    main(sys.argv[1])
