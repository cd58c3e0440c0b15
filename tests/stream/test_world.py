import pytest

from vlm_stream.errors import ConfigError
from vlm_stream.stream.world import World, find_world


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
