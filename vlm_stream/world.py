"""Which data-parallel rank this process is, and of how many.

Asked when iteration starts: launchers and trainers (`mp.spawn`, Lightning, Ray Train) tell a process its rank after the
loader was built. Only this file reads the environment for it.
"""

import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

from vlm_stream.errors import ConfigError

_LAUNCHERS: Final = (
    ("torchrun", ("RANK",), ("WORLD_SIZE",)),
    ("MPI", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",)),
    ("MPI", ("PMI_RANK", "MV2_COMM_WORLD_RANK"), ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")),
    ("SLURM", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)
"""Launchers with the variables of the rank and of the number of ranks; one that starts others comes behind them."""


_LOCAL_SIZES: Final = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
"""Variables that say how many processes were started on this machine."""

_DATA: Final = ("dp", "data", "replicate", "shard", "batch")
_MODEL: Final = frozenset(
    ("cp", "ep", "etp", "pp", "sp", "tp", "context", "expert", "model", "pipeline", "sequence", "stage", "tensor")
)
_PARTS: Final = ("replicate", "shard", "fsdp")
"""Names of dimensions beside which there may be other data-parallel ones."""

Kind = Literal["data", "mixed", "model", "unknown"]


@dataclass(frozen=True, slots=True)
class World:
    """A rank among its data-parallel peers."""

    rank: int
    size: int
    told_by: str = field(default="arguments", compare=False)
    """Who said so: `arguments`, `device mesh`, `torch.distributed`, `Ray Train`, a launcher, or `nobody`."""
    peers: int = field(default=1, compare=False)
    """Processes with this rank, where a device mesh tells: they get the same data."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank {self.rank} of {self.size} does not exist, so no share of the data can be given to it (told by "
                f"{self.told_by}); ranks count from 0 to world_size - 1"
            )


def find_world(rank: int | None = None, world_size: int | None = None, device_mesh: Any = None) -> World:
    """Return the world from the arguments, a `DeviceMesh`, torch.distributed, Ray Train or the launcher, in that order.

    A mesh of several dimensions must name its data-parallel ones (see `find_mesh_rank`): tensor-, context- and
    pipeline-parallel peers get the same data.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size belong together, and only one of them was given; give both or neither")
    if rank is not None and world_size is not None:
        return World(rank, world_size)
    if device_mesh is not None:
        found_rank, found_size = find_mesh_rank(device_mesh)
        peers = max(_find_root(device_mesh).size() // found_size, 1)
        return World(found_rank, found_size, "device mesh", peers)
    told = [world for world in (_from_distributed(), _from_ray_train()) if world is not None]
    if told and told[0].size > 1:  # launchers may tell the environment less: Lightning's, not which rank this is
        return told[0]
    found = [*told, *_from_launchers()]
    if not found:
        return World(0, 1, "nobody")
    several = [world for world in found if world.size > 1]
    if found[0].size == 1 and several:
        raise ConfigError(
            f"{found[0].told_by} says that this process is alone, and {several[0].told_by} that it is one of "
            f"{several[0].size}; if both were believed, all of them would train on the same data. Start them as one "
            f"job, or pass rank and world_size (rank=0, world_size=1 for a process that is alone)"
        )
    return found[0]


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of(world: World) -> int:
    """Return this process's share of the machine's cores; where nobody tells, all ranks are on this machine."""
    processes = _number(_LOCAL_SIZES) or world.size * world.peers
    return max(num_cores() // max(processes, 1), 1)


def check_world(world: World) -> None:
    """Refuse to go on with a rank that torch.distributed, initialised since, contradicts."""
    if world.told_by in ("arguments", "device mesh"):
        return
    now = _from_distributed()
    if now is not None and now != world:
        raise ConfigError(
            f"iteration began as rank {world.rank} of {world.size} (told by {world.told_by}), and torch.distributed "
            f"was initialised since as rank {now.rank} of {now.size}, so this process would train on another rank's "
            f"data; iterate after init_process_group, or pass rank and world_size"
        )


def _from_distributed() -> World | None:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return World(dist.get_rank(), dist.get_world_size(), "torch.distributed")


def _from_ray_train() -> World | None:
    """Return the rank that Ray Train gave this worker; a process that never imported it is none of its workers.

    Outside of a worker the newer API raises; the older one warns and answers rank 0 of 1, but has no experiment's name.
    """
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            context = train.get_context()
            if context.get_experiment_name() is None:
                return None
            rank, size = context.get_world_rank(), context.get_world_size()
        except (RuntimeError, DeprecationWarning):  # the latter in a function that Ray Tune runs
            return None
    return None if rank is None or size is None else World(rank, size, "Ray Train")


def _from_launchers() -> list[World]:
    """Return what the environment says, the nearest launcher first."""
    found: list[World] = []
    for name, rank_names, size_names in _LAUNCHERS:
        rank, size = _number(rank_names), _number(size_names)
        if size is None or (rank is None and size == 1):
            continue
        if rank is None or (name == "SLURM" and _is_batch_script(size)):
            if found:
                continue
            raise ConfigError(
                f"the environment says that {size} processes were started ({name}: {'/'.join(size_names)}) and not "
                f"which of them this is, so all would train on the same data; start them by srun, mpirun or torchrun, "
                f"iterate after init_process_group, or pass rank and world_size (rank=0, world_size=1 if it is alone)"
            )
        found.append(World(rank, size, name))
    return found


def _is_batch_script(size: int) -> bool:
    """Tell whether this is the script of a SLURM job itself, which has rank 0 whatever it starts."""
    environ = os.environ
    return size > 1 and "SLURM_JOB_ID" in environ and not {"SLURM_STEP_ID", "SLURM_STEPID"} & environ.keys()


def _number(names: tuple[str, ...]) -> int | None:
    for name in names:
        text = os.environ.get(name)
        if text is None:
            continue
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                f"the environment has {name}={text!r}, which is no number, so the rank of this process is not known; "
                f"correct it, or pass rank and world_size"
            ) from None
    return None


# Device meshes. A part of one is traced to the mesh that it was cut from, whose names say more: `mesh["dp_shard"]`
# alone does not show that there is a `dp_replicate` beside it, and a flattened `dp_shard_cp` not who shares data.


def find_mesh_rank(mesh: Any) -> tuple[int, int]:
    """Return the data-parallel rank of this process and the number of such ranks."""
    root = _find_root(mesh)
    names = tuple(mesh.mesh_dim_names or ())
    if mesh.ndim == 1 and root is mesh:
        if not names:
            return mesh.get_local_rank(), mesh.size()
        if _kind(names[0]) == "model":
            return 0, 1
        if names[0] == "world" or _kind(names[0]) == "mixed":
            _refuse(names, "it holds all ranks")
        return mesh.get_local_rank(), mesh.size()
    if root.ndim > 1 and any(_kind(name) == "data" for name in root.mesh_dim_names or ()):
        return _count(root)
    if root is not mesh and mesh.size() != root.size() and not _has_all(names):
        _refuse(names, "there may be data-parallel ranks that it leaves out")
    if root is not mesh and "fsdp" in names and "cp" not in names and mesh["fsdp"].size() > 1:
        _refuse(names, "'fsdp' may hold context-parallel ranks, too")  # one view of several, as torchtitan makes them
    return _count(mesh)


def _count(mesh: Any) -> tuple[int, int]:
    names = tuple(mesh.mesh_dim_names or ())
    rank, size = 0, 1
    for name in names:
        kind, num_ranks = _kind(name), mesh[name].size()
        if kind == "mixed" and num_ranks > 1:
            _refuse(names, f"{name!r} holds data-parallel and model-parallel ranks in one dimension")
        if kind == "data":
            rank = rank * num_ranks + mesh.get_local_rank(name)
            size *= num_ranks
    if not any(_kind(name) in ("data", "mixed") for name in names):
        raise ConfigError(
            f"the device mesh has the dimensions {names}, and none of them is named as data-parallel, so ranks cannot "
            f"be told from their model-parallel peers; name one of them 'dp', or pass rank and world_size"
        )
    return rank, size


def _kind(name: str) -> Kind:
    is_data = any(part in name for part in _DATA)
    if name.startswith("efsdp") or not _MODEL.isdisjoint(name.replace("-", "_").split("_")):
        return "mixed" if is_data else "model"
    return "data" if is_data else "unknown"


def _has_all(names: tuple[str, ...]) -> bool:
    """Tell whether the data-parallel dimensions of a part are all that there can be, by their names alone."""
    data = [name for name in names if _kind(name) == "data"]
    whole = [name for name in data if not any(part in name for part in _PARTS)]
    return bool(whole) or all(any(part in name for name in data) for part in ("replicate", "shard"))


def _find_root(mesh: Any) -> Any:
    """Return the mesh that this one was cut or flattened from, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # before torch 2.10, a table kept them

    roots: dict[Any, Any] = getattr(getattr(device_mesh, "_mesh_resources", None), "child_to_root_mapping", {})
    return roots.get(mesh, mesh)


def _refuse(names: tuple[str, ...], why: str) -> NoReturn:
    raise ConfigError(
        f"the device mesh {names} does not say which ranks are data-parallel ({why}), so model-parallel peers might "
        f"get different data, or data-parallel ranks the same; give the mesh with all its dimensions, the one of all "
        f"data-parallel ranks (torchtitan: parallel_dims.get_mesh('batch')), or rank and world_size"
    )
