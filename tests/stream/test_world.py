import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlm_stream.errors import ConfigError
from vlm_stream.loader_options import LoaderOptions, RayBuilders
from vlm_stream.world import World, cores_of, find_world


class Mesh:
    """Stand-in with the four members of a DeviceMesh that are used: a real one needs a process per rank."""

    def __init__(self, sizes, position):
        self.mesh_dim_names, self._sizes, self._position, self.ndim = tuple(sizes), sizes, position, len(sizes)

    def __getitem__(self, name):
        return Mesh({name: self._sizes[name]}, {name: self._position[name]})

    def size(self):
        return next(iter(self._sizes.values()))

    def get_local_rank(self, name=None):
        return self._position[name or self.mesh_dim_names[0]]


def test_arguments_win(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_world(3, 4, Mesh({"dp": 8}, {"dp": 5})) == World(3, 4)
    assert find_world(device_mesh=Mesh({"dp": 8}, {"dp": 5})) == World(5, 8)
    assert find_world() == World(1, 2)


def test_alone_without_anything(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert find_world() == World(0, 1)


def test_a_mesh_counts_only_its_data_parallel_dimensions():
    mesh = Mesh({"dp_replicate": 2, "dp_shard": 3, "tp": 4}, {"dp_replicate": 1, "dp_shard": 2, "tp": 3})
    assert find_world(device_mesh=mesh) == World(5, 6)


def test_impossible_worlds_are_refused():
    with pytest.raises(ConfigError, match="rank 2 of 2 does not exist"):
        World(2, 2)
    with pytest.raises(ConfigError, match="rank and world_size belong together"):
        find_world(rank=1)
    with pytest.raises(ConfigError, match="none of them is named as data-parallel"):
        find_world(device_mesh=Mesh({"tp": 2, "pp": 2}, {"tp": 0, "pp": 0}))


@pytest.fixture
def bare(monkeypatch):
    """Give an environment in which nothing was launched."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "MV2_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    return monkeypatch


def launch(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": 1, "WORLD_SIZE": 2}, World(1, 2)),
        ({"SLURM_PROCID": 3, "SLURM_NTASKS": 4}, World(3, 4)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0}, World(0, 4)),
        ({"SLURM_PROCID": 1, "SLURM_NTASKS": 9, "SLURM_STEP_NUM_TASKS": 2}, World(1, 2)),
        ({"OMPI_COMM_WORLD_RANK": 2, "OMPI_COMM_WORLD_SIZE": 3}, World(2, 3)),
        ({"PMI_RANK": 2, "PMI_SIZE": 3}, World(2, 3)),
        ({"RANK": 5, "WORLD_SIZE": 8, "SLURM_PROCID": 1, "SLURM_NTASKS": 2}, World(5, 8)),  # torchrun on two nodes
        ({"RANK": 0, "WORLD_SIZE": 2, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 7}, World(0, 2)),  # torchrun in a job's script
        ({"SLURM_NTASKS": 1}, World(0, 1)),
        ({"WORLD_SIZE": 1}, World(0, 1)),
    ],
)
def test_launchers_tell_the_rank(bare, variables, expected):
    launch(bare, **variables)
    assert find_world() == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": 2}, "says that 2 processes were started .*so all would train on the same data"),
        ({"SLURM_NTASKS": 4}, "says that 4 processes were started .SLURM"),
        ({"SLURM_NTASKS": 4, "SLURM_PROCID": 0, "SLURM_JOB_ID": 7}, "4 processes were started"),
        (
            {"RANK": 0, "WORLD_SIZE": 1, "SLURM_PROCID": 1, "SLURM_NTASKS": 4},
            "torchrun says .* alone, and SLURM",
        ),
        ({"RANK": "one", "WORLD_SIZE": 2}, "RANK='one', which is no number"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "rank 2 of 2 does not exist"),
    ],
)
def test_ranks_that_cannot_be_told_are_refused(bare, variables, message):
    launch(bare, **variables)
    with pytest.raises(ConfigError, match=message):
        find_world()
    assert find_world(0, 1) == World(0, 1)


def test_a_mesh_of_model_parallel_peers_alone_gives_them_the_same_data():
    assert find_world(device_mesh=Mesh({"tp": 4}, {"tp": 3})) == World(0, 1)


LATE = """
import sys, torch.distributed as dist
from vlm_stream import StreamLoader
if __name__ == "__main__":
    loader = StreamLoader(sys.argv[1], processor=sys.argv[2], pack_size=1024)
    batches = iter(loader)
    next(batches)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=int(sys.argv[4]), world_size=2)
    state = loader.state_dict()
    try:
        next(batches)
    except ValueError as error:
        print(error)
    assert loader.state_dict() == state
    print(loader.world.rank, loader.world.size, next(iter(loader)) is not None)
    dist.destroy_process_group()
"""


def test_a_process_group_that_comes_later_is_noticed(bare, toy_shards, saved_processor, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    processes = [
        subprocess.Popen(
            [sys.executable, script, toy_shards, saved_processor, tmp_path / "store", str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    for rank, (sentence, found) in enumerate(told):
        assert sentence.startswith("iteration began as rank 0 of 1 (told by nobody), and torch.distributed was")
        assert found == f"{rank} 2 True"


def test_clips_are_decoded_by_cores_that_no_other_process_has(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    alone, many = World(0, 1), World(0, 6)
    assert [cores_of(World(0, 1)), cores_of(many), cores_of(World(0, 3, peers=2)), cores_of(World(0, 99))] == [
        12,
        2,
        2,
        1,
    ]
    assert [LoaderOptions(num_workers=number).threads_of(alone) for number in (0, 1, 2, 5, 30)] == [8, 6, 4, 2, 1]
    assert LoaderOptions(num_workers=1).threads_of(many) == 1
    assert LoaderOptions(num_workers=30, decode_threads=3).threads_of(many) == 3
    assert LoaderOptions(builders=RayBuilders(num_cpus=4)).threads_of(many) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cores_of(World(0, 64)) == 3


class Train:
    """Stand-in with the one function of `ray.train` that is used: a real one needs a cluster."""

    def __init__(self, answer):
        self.get_context = answer


def context_of(rank, size, experiment="run"):
    names = {"get_world_rank": rank, "get_world_size": size, "get_experiment_name": experiment}
    return lambda: SimpleNamespace(**{name: lambda value=value: value for name, value in names.items()})


def no_worker():
    raise RuntimeError("ray.train.get_context() is called outside of a worker")


def test_ray_train_tells_the_rank_of_its_workers_alone(bare):
    bare.setitem(sys.modules, "ray.train", Train(context_of(1, 3)))
    assert (find_world(), find_world().told_by) == (World(1, 3), "Ray Train")
    assert find_world(0, 2).told_by == "arguments"
    for answer in (no_worker, context_of(0, 1, experiment=None), context_of(None, None)):
        bare.setitem(sys.modules, "ray.train", Train(answer))
        assert (find_world(), find_world().told_by) == (World(0, 1), "nobody")
    launch(bare, RANK=1, WORLD_SIZE=2)  # a process that Ray Train has nothing to do with
    assert find_world() == World(1, 2)
    bare.setitem(sys.modules, "ray.train", Train(context_of(0, 1)))
    with pytest.raises(ConfigError, match="Ray Train says that this process is alone, and torchrun that it is one of"):
        find_world()
