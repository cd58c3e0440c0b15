"""Peers on one machine: each batch is built once, through shared memory, and whoever dies is no loss."""

import fcntl
import os
from pathlib import Path

import pytest
import torch

from tests.service.conftest import PACKED, same
from vlm_stream import StreamLoader
from vlm_stream.dispatch import SharedPool, ShmBoard
from vlm_stream.dispatch.pool import Finished
from vlm_stream.errors import ConfigError


def finished(value):
    return Finished(0, 0, value, 0)


def test_peers_with_local_workers_build_each_batch_once(nothing_is_late, toy_shards, saved_processor):
    options = {"processor": str(saved_processor), "peers": 2, "rank": 0, "world_size": 1, "num_workers": 1, **PACKED}
    expected = [dict(batch) for batch in StreamLoader(toy_shards, processor=str(saved_processor), **PACKED)]
    first, second = StreamLoader(toy_shards, **options), StreamLoader(toy_shards, **options)
    for number, (one, two) in enumerate(zip(first, second, strict=True)):
        assert same(dict(two), expected[number])
        two["pixel_values"] += 1
        assert same(dict(one), expected[number])
    taken = first.metrics()["built_by_peers"] + second.metrics()["built_by_peers"]
    assert taken == len(expected)
    assert first.state_dict() == second.state_dict()


def test_one_claims_and_the_others_take_what_was_posted(tmp_path):
    boards = [ShmBoard("group", 3, tmp_path) for _ in range(3)]
    assert [board.claim("a") for board in boards] == [True, False, False]
    assert boards[1].look("a") == "wait"
    boards[0].post("a", finished({"x": torch.arange(100_000)}))
    for board in boards[1:]:
        found = board.look("a")
        found["x"] += 1  # its own copy of the page
        assert torch.equal(found["x"], torch.arange(100_000) + 1)
    assert boards[1].look("a") == "gone"  # all have it
    for board in boards:
        board.close()
    assert not list(tmp_path.glob("*/*"))


def test_a_claim_ends_with_its_process(tmp_path):
    board = ShmBoard("group", 2, tmp_path)
    if (pid := os.fork()) == 0:  # claims, and dies without a word
        ShmBoard("group", 2, tmp_path).claim("a")
        os._exit(0)
    os.waitpid(pid, 0)
    assert board.look("a") == "gone"
    assert board.claim("a")
    board.close()


def test_boards_of_the_dead_are_removed_and_those_being_joined_are_not(tmp_path):
    dead = tmp_path / f"vlm-stream-boards-{os.getuid()}" / "dead"
    dead.mkdir(parents=True)
    (dead / "members").touch()
    alive = ShmBoard("alive", 2, tmp_path)
    assert not dead.exists()
    other = ShmBoard("other", 2, tmp_path)
    assert Path(alive._folder).exists()
    with (alive._folder / "members").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    alive.close()
    other.close()


def test_a_failed_batch_is_given_back(tmp_path):
    boards = [ShmBoard("group", 2, tmp_path) for _ in range(2)]
    assert boards[0].claim("a")
    boards[0].release("a")
    assert boards[1].look("a") == "gone"
    assert boards[1].claim("a")
    for board in boards:
        board.close()


def test_a_board_is_left_where_nobody_can_be_started(tmp_path):
    def no_pool(_listener):
        raise ConfigError("the config cannot be sent")

    with pytest.raises(ConfigError):
        SharedPool(no_pool, print, ShmBoard("group", 2, tmp_path))
    assert not list(tmp_path.glob("*/*"))
