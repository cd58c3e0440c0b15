"""Which data-parallel rank this process is, and of how many."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vlm_stream.errors import ConfigError

__all__ = ["World", "find_world"]


@dataclass(frozen=True, slots=True)
class World:
    """A rank among its data-parallel peers."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        """Refuse ranks that do not exist."""
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank {self.rank} of {self.size} does not exist, so no share of the data can be given to it; "
                f"ranks count from 0 to world_size - 1"
            )


def find_world(rank: int | None = None, world_size: int | None = None, device_mesh: Any = None) -> World:
    """Return the world from the arguments, a `DeviceMesh`, torch.distributed or torchrun's environment, in that order.

    A mesh of several dimensions must name its data-parallel ones (a name that contains "dp", "data" or "replicate" or
    "shard"): tensor-, context- and pipeline-parallel peers get the same data.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size belong together, and only one of them was given; give both or neither")
    if rank is not None and world_size is not None:
        return World(rank, world_size)
    if device_mesh is not None:
        return _from_mesh(device_mesh)
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return World(0, 1)


def _from_mesh(mesh: Any) -> World:
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return World(mesh.get_local_rank(), mesh.size())
    data = [n for n in names or () if any(part in n for part in ("dp", "data", "replicate", "shard"))]
    if not data:
        raise ConfigError(
            f"the device mesh has the dimensions {names}, and none of them is named as data-parallel, so ranks cannot "
            f"be told from their model-parallel peers; name one of them 'dp', or pass rank and world_size"
        )
    rank, size = 0, 1
    for name in data:
        rank = rank * mesh[name].size() + mesh.get_local_rank(name)
        size *= mesh[name].size()
    return World(rank, size)
