"""What is lost on Ray, and what it costs: samples that kill, busy builders, boards, reserves that cannot begin."""

import asyncio
import subprocess
import sys
import threading

import pytest

from tests.dispatch.jobs import blueprint
from tests.service.conftest import raw_loader
from tests.service.jobs import RayNumbers, dispatch_on_ray, kill_self, run_on_ray
from tests.waiting import WAIT_S, wait_for
from vlm_stream import RayBuilders, StreamLoader
from vlm_stream.dispatch import RayBoard, connect, ray_builder
from vlm_stream.dispatch.ray_builder import RayBuilder
from vlm_stream.errors import ConfigError


def test_a_sample_that_kills_is_found_by_the_reserve_and_left_out(cluster):
    batches = run_on_ray(RayNumbers({7: kill_self}), RayBuilders(count=1, num_cpus=0.5, local=1), count=12)
    assert "3 workers were lost while they worked on it" in batches[7]["said"]
    assert [number for number, batch in enumerate(batches) if "said" in batch] == [7]


def test_functions_of_scripts_reach_the_reserve_too(cluster, toy_shards):
    expected = [batch["keys"] for batch in raw_loader(toy_shards)]
    options = {"builders": RayBuilders(count=0, local=1), "mode": "plain"}
    loader = StreamLoader(
        toy_shards, processor=None, collate_fn=lambda rows, _: {"keys": [r.key for r in rows]}, **options
    )
    assert [batch["keys"] for batch in loader] == expected


def test_a_reserve_that_cannot_begin_does_not_end_a_run(cluster, caplog):
    dispatcher = dispatch_on_ray(RayNumbers(needs_ray=True), RayBuilders(count=1, num_cpus=0.5, local=1))
    wait_for(lambda: "a process in reserve cannot begin" in caplog.text)  # before the run is at its end
    assert [delivery.batch["number"] for _, delivery in dispatcher] == list(range(20))
    dispatcher.close()
    assert "there is no processor on this machine" in caplog.text
    with pytest.raises(ImportError, match="no processor on this machine"):  # now there is nobody else
        run_on_ray(RayNumbers(needs_ray=True), RayBuilders(count=0, local=1))


def test_a_slow_trainer_does_not_fill_the_object_store(cluster, nothing_is_late):
    """All batches together would fill it five times."""
    size, limit = 10 << 20, 50 << 20
    builders = RayBuilders(count=2, num_cpus=0.5, local=0)
    dispatcher = dispatch_on_ray(RayNumbers(size=size, num_bytes=size), builders, 100, max_bytes=limit)
    try:
        for number in range(100):
            (_, delivery) = next(dispatcher)
            assert delivery.batch["number"] == number
            del delivery
            if number >= 60:  # by then it is known how large they are
                if number == 60:  # the trainer does something else until all have stopped
                    wait_for(lambda: dispatcher.num_ready() >= 4)
                built = sum(row["built"] for row in dispatcher.builders())
                assert built - (number + 1) <= limit // size + 2
    finally:
        dispatcher.close()


OWNER = """
import sys, time
from vlm_stream import RayBuilders
from vlm_stream.dispatch import RayBoard
board = RayBoard(RayBuilders(address=sys.argv[1]), "of-another", 2)
print(board.claim("a"), flush=True)
time.sleep(600)
"""


def test_a_board_that_dies_with_its_owner_is_made_again(cluster, nothing_is_late):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, cluster.address], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline().strip() == "True"  # so it was connected, by an address
        board = RayBoard(RayBuilders(), "of-another", 2)
        assert not board.claim("a")
        assert board.look("a") == "wait"
    finally:
        owner.kill()
        owner.wait()
    wait_for(lambda: board.look("a") == "gone")
    wait_for(lambda: board.claim("a"))
    other = RayBoard(RayBuilders(), "of-another", 2)
    assert not other.claim("a")  # without a board everybody may build
    other.close()
    board.close()


def test_another_cluster_than_the_one_in_use_is_refused(cluster):
    connect(RayBuilders(address=cluster.address))
    connect(RayBuilders(address="auto"))
    with pytest.raises(ConfigError, match=r"connected to the Ray cluster at .*builders.address is 127.0.0.9:6379"):
        connect(RayBuilders(address="127.0.0.9:6379"))


class Gate:
    """Stops one build until it is opened."""

    entered, is_open = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.is_open.wait(WAIT_S)


async def open_builder(*runs):
    from ray import cloudpickle

    builder = RayBuilder()
    config = cloudpickle.dumps(RayNumbers({0: Gate()}))
    for run in runs:
        await builder.open(run, "key", config, 1.0)
    return builder


def test_ranks_with_one_config_have_one_processor_which_is_closed_after_the_last_build(cluster, monkeypatch):
    async def run():
        builder = await open_builder(*map(str, range(40)))
        (opened,) = builder._builders.values()
        building = asyncio.ensure_future(builder.build("0", 1, blueprint(0), {}, False))
        await asyncio.to_thread(Gate.entered.wait, WAIT_S)
        waiting = asyncio.ensure_future(builder.build("1", 2, blueprint(1), {}, False))
        await asyncio.sleep(0)
        monkeypatch.setattr(ray_builder, "_IDLE_S", -1.0)
        builder._forget()
        assert set(builder._runs) == {"0", "1"}  # one builds, one waits, the others may be dead
        await builder.close("0")
        await builder.close("1")
        assert await waiting is None
        assert not opened.result().is_closed
        Gate.is_open.set()
        assert (await building)[0] == "done"
        while not opened.result().is_closed:
            await asyncio.sleep(0.01)
        assert await builder.build("0", 3, blueprint(2), {}, False) == ("unknown",)

    Gate.entered.clear()
    Gate.is_open.clear()
    asyncio.run(run())


def test_a_busy_builder_is_ended_only_by_the_run_whose_batch_it_cannot_finish(cluster, monkeypatch):
    ended = []

    async def run():
        builder = await open_builder("one", "other")
        building = asyncio.ensure_future(builder.build("one", 1, blueprint(0), {}, False))
        await asyncio.to_thread(Gate.entered.wait, WAIT_S)
        await builder.end_if_stuck("one")
        assert not ended  # it has begun a moment ago
        monkeypatch.setattr(ray_builder, "_STUCK_S", -1.0)
        await builder.end_if_stuck("other")
        assert not ended
        await builder.end_if_stuck("one")
        assert ended == [1]
        Gate.is_open.set()
        await building

    monkeypatch.setattr(ray_builder.os, "_exit", ended.append)
    Gate.entered.clear()
    Gate.is_open.clear()
    asyncio.run(run())


def test_what_is_dropped_is_what_was_given_before_it_whatever_arrives_first(cluster):
    """Ray may deliver calls in any order."""

    async def run():
        builder = await open_builder("run")
        building = asyncio.ensure_future(builder.build("run", 0, blueprint(0), {}, False))
        await asyncio.to_thread(Gate.entered.wait, WAIT_S)
        second = asyncio.ensure_future(builder.build("run", 2, blueprint(5), {}, False))
        await asyncio.sleep(0)
        await builder.drop("run", 1)  # of a batch 5 that was given first, and comes last
        first = asyncio.ensure_future(builder.build("run", 1, blueprint(5), {}, False))
        Gate.is_open.set()
        assert [answer[0] for answer in await asyncio.gather(building, first, second)] == ["done"] * 3

    Gate.entered.clear()
    Gate.is_open.clear()
    asyncio.run(run())
