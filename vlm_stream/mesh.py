"""Which data-parallel rank a `DeviceMesh` gives this process.

Enters: a mesh, whole or a part of one. Leaves: a rank and a number of ranks. A part is traced to the mesh that it was
cut from, whose names say more: `mesh["dp_shard"]` alone does not show that there is a `dp_replicate` beside it, and a
flattened `dp_shard_cp` not which of its ranks share their data.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NoReturn

from vlm_stream.errors import ConfigError

__all__ = ["find_mesh_rank"]

_DATA: Final = ("dp", "data", "replicate", "shard", "batch")
_MODEL: Final = frozenset(
    ("cp", "ep", "etp", "pp", "sp", "tp", "context", "expert", "model", "pipeline", "sequence", "stage", "tensor")
)
_PARTS: Final = ("replicate", "shard", "fsdp")
"""Names of dimensions beside which there may be other data-parallel ones."""

Kind = Literal["data", "mixed", "model", "unknown"]


def find_mesh_rank(mesh: Any) -> tuple[int, int]:
    """Return the data-parallel rank of this process and the number of such ranks.

    Raises:
        ConfigError: The names of the dimensions do not tell data-parallel ranks from their model-parallel peers.
    """
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
