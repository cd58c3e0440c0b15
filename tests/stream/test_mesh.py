"""Data-parallel ranks from real device meshes, as trainers name them, on every rank of a world of 16."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from vlm_stream.errors import ConfigError
from vlm_stream.world import find_mesh_rank

WORLD = 16
FLAT = "ignore:Slicing a flattened dim:FutureWarning"


@pytest.fixture
def on_rank():
    """Return a function that makes this process one rank of 16; a process group that sends nothing stands for them."""

    def start(rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())

    yield start
    dist.destroy_process_group()


def make(**sizes):
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def unflatten(**sizes):
    """As torchtitan makes its meshes: several views of one mesh, whose name says nothing."""
    return make(world=WORLD)._unflatten(0, tuple(sizes.values()), tuple(sizes))


def part(mesh, *names):
    return mesh[names]


def flat(mesh, name, *names):
    return mesh[names]._flatten(name)


def replicas(rank):
    """2 dp_replicate x 2 dp_shard x 2 cp x 2 tp: the last four ranks of 16 are the fourth data-parallel rank."""
    return (rank // 4, 4)


HSDP = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
MESHES = {
    "all dimensions": (lambda: make(**HSDP), replicas),
    "with pipeline stages": (
        lambda: make(pp=2, dp_replicate=2, dp_shard=2, cp=1, tp=2),
        lambda rank: (rank % 8 // 2, 4),
    ),
    "both data-parallel dimensions": (lambda: part(make(**HSDP), "dp_replicate", "dp_shard"), replicas),
    "one of them": (lambda: make(**HSDP)["dp_shard"], replicas),
    "tensor-parallel peers": (lambda: make(**HSDP)["tp"], replicas),
    "flattened dp": (lambda: flat(make(**HSDP), "dp", "dp_replicate", "dp_shard"), replicas),
    "flattened with context": (lambda: flat(make(**HSDP), "dp_shard_cp", "dp_shard", "cp"), replicas),
    "flattened for the loss": (lambda: flat(make(**HSDP), "loss", "dp_replicate", "dp_shard", "cp"), replicas),
    "fsdp and tp": (lambda: make(fsdp=8, tp=2), lambda rank: (rank // 2, 8)),
    "Lightning": (lambda: make(data_parallel=4, tensor_parallel=4), lambda rank: (rank // 4, 4)),
    "unnamed": (lambda: init_device_mesh("cpu", (WORLD,)), lambda rank: (rank, WORLD)),
    "dp_shard only": (lambda: make(dp_shard=WORLD), lambda rank: (rank, WORLD)),
    "tp only": (lambda: make(tp=WORLD), lambda rank: (0, 1)),
    "torchtitan, batch": (lambda: unflatten(pp=1, batch=4, cp=2, tp=2)["batch"], replicas),
    "torchtitan, data loading": (lambda: unflatten(pp=1, batch=4, cp=2, tp=2), replicas),
    "torchtitan, dense": (lambda: unflatten(pp=1, **HSDP), replicas),
    "torchtitan, data-parallel of dense": (lambda: part(unflatten(pp=1, **HSDP), "dp_replicate", "dp_shard"), replicas),
    "torchtitan, dp": (lambda: part(unflatten(pp=1, dp=4, cp=2, tp=2), "dp", "cp", "tp"), replicas),
}


@pytest.mark.filterwarnings(FLAT)
@pytest.mark.parametrize("name", MESHES)
def test_model_parallel_peers_share_a_rank_and_others_do_not(on_rank, name):
    build, expected = MESHES[name]
    for rank in range(WORLD):
        on_rank(rank)
        assert find_mesh_rank(build()) == expected(rank)


@pytest.mark.filterwarnings(FLAT)
@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: make(world=WORLD), "it holds all ranks"),
        (lambda: unflatten(pp=1, **HSDP)["dp_shard"], "ranks that it leaves out"),
        (lambda: unflatten(pp=1, batch=4, cp=2, tp=2)["tp"], "ranks that it leaves out"),
        (lambda: flat(unflatten(pp=1, batch=4, cp=2, tp=2), "loss_mesh", "batch", "cp"), "ranks that it leaves out"),
        (lambda: part(unflatten(pp=1, dp_replicate=2, fsdp=4, tp=2), "fsdp", "tp"), "ranks that it leaves out"),
        (lambda: unflatten(pp=1, dp_replicate=2, fsdp=4, tp=2), "'fsdp' may hold context-parallel ranks, too"),
        (lambda: unflatten(pp=1, dp_replicate=2, efsdp=4, ep=2), "'efsdp' holds data-parallel and model-parallel"),
        (lambda: make(dp_replicate=2, dp_shard_cp=4, tp=2), "'dp_shard_cp' holds data-parallel and model-parallel"),
        (lambda: make(tp=4, pp=4), "none of them is named as data-parallel"),
    ],
)
def test_meshes_that_do_not_tell_are_refused(on_rank, build, why):
    on_rank(5)
    with pytest.raises(ConfigError, match=why):
        find_mesh_rank(build())
