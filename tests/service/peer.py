"""A trainer's process that shares its batches: `python -m tests.service.peer SHARDS PROCESSOR OUT BUILDERS`.

It writes what it was given and how much of it its own builders built.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.waiting import WAIT_S
from vlm_stream import RayBuilders, StreamLoader
from vlm_stream.dispatch import ray_board
from vlm_stream.dispatch.schedule import Schedule
from vlm_stream.dispatch.values import ScheduledBuilder


def main(shards: str, processor: str, out: str, builders: str) -> None:
    Schedule._is_over = lambda *_: False  # nothing is late because a machine is busy: what is built is counted
    ScheduledBuilder.is_open = lambda self, _now: not self.is_retiring
    ray_board._ANSWER_S = ray_board._START_S = WAIT_S
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    options = {"num_workers": 1}
    if builders != "processes":
        import ray

        ray.init(
            address=builders,
            _node_ip_address="127.0.0.2",
            namespace=f"own-{rank}",
            log_to_driver=False,
            logging_level=40,
        )
        options = {"builders": RayBuilders(count=1, local=0)}
    loader = StreamLoader(shards, processor=processor, device_mesh=mesh, pack_size=1024, with_refs=True, **options)
    batches, built, taken = [], 0, 0
    for batch in loader:
        batches.append(dict(batch))
        dist.barrier()  # as peers of one step do
        built, taken = sum(row["built"] for row in loader.builders()), loader.metrics()["built_by_peers"]
    torch.save(
        {"batches": batches, "built": built, "taken": taken, "state": loader.state_dict()}, Path(out) / f"{rank}.pt"
    )
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Ray's and gloo's threads would fight over the exit


if __name__ == "__main__":
    main(*sys.argv[1:])
