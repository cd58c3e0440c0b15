"""How many builders there are, whose batch is next, and who is near: laws without a cluster."""

import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.dispatch import ray_board
from vlm_stream.dispatch.pool import Joined, Lost
from vlm_stream.dispatch.ray_board import BoardActor
from vlm_stream.dispatch.ray_builder import Shares
from vlm_stream.dispatch.ray_keeper import Load
from vlm_stream.dispatch.ray_pool import owner_of
from vlm_stream.dispatch.schedule import Schedule
from vlm_stream.dispatch.team import Scaler, Team


class Trainer:
    """Takes a batch each second, with as many builders as the scaler says."""

    def __init__(self, least, most, begin):
        self.scaler, self.now, self.builders = Scaler(least, most), 0.0, begin

    def take(self, num_batches, waited_s, num_idle, num_ready=0):
        for _ in range(num_batches):
            self.now += 1.0
            self.builders = self.scaler.saw(self.now, waited_s, num_idle, self.builders, num_ready)


@given(
    least=st.integers(0, 8),
    more=st.integers(1, 40),
    takes=st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1), st.integers(0, 40)), max_size=20),
)
def test_the_number_of_builders_stays_within_its_limits(least, more, takes):
    trainer = Trainer(least, least + more, least)
    for num_batches, waited_s, num_idle in takes:
        trainer.take(num_batches, waited_s, min(num_idle, trainer.builders))
        assert least <= trainer.builders <= least + more


def test_builders_grow_while_the_trainer_waits_and_shrink_when_they_are_idle():
    trainer = Trainer(2, 16, 2)
    trainer.take(200, waited_s=0.5, num_idle=0)
    assert trainer.builders == 16
    trainer.take(30, waited_s=0.0, num_idle=0)  # nobody waits and all have work: so it shall stay
    assert trainer.builders == 16
    trainer.take(2000, waited_s=0.0, num_idle=4)
    assert trainer.builders == 2


def test_builders_shrink_when_batches_pile_up():
    trainer = Trainer(1, 8, 8)
    trainer.take(100, waited_s=0.0, num_idle=0, num_ready=8)
    assert trainer.builders == 8
    trainer.take(2000, waited_s=0.0, num_idle=0, num_ready=100)
    assert trainer.builders == 1


def test_waiting_with_idle_builders_asks_for_no_more():
    trainer = Trainer(2, 16, 4)
    trainer.take(200, waited_s=0.5, num_idle=2)  # the next batch is late, not the builders too few
    assert trainer.builders == 4


class NoPool:
    """Notes what it is asked."""

    def __init__(self):
        self.numbers, self.stopped = itertools.count(), []

    def grow(self, *, is_reserve=False):
        return next(self.numbers)

    def stop(self, builder, why=""):
        self.stopped.append(builder)


def test_builders_that_find_no_room_are_let_go_first():
    pool = NoPool()
    team = Team(pool, Schedule(1 << 30), 6, 0)
    for number in range(2):
        team.join(Joined(number))
    team.want(3)
    assert pool.stopped == [3, 4, 5]
    assert (len(team.starting), team.num_usual) == (1, 3)
    team.join(Joined(4))  # it had begun a moment before
    assert pool.stopped == [3, 4, 5, 4]
    assert not team.lose(Lost(4, "was let go", None, None))
    assert team.lose(Lost(0, "is gone", None, None))
    team.fill()
    assert team.num_usual == 3


NODES = st.lists(st.text("0123456789abcdef", min_size=4, max_size=4), min_size=2, max_size=9, unique=True)


@given(NODES, st.integers(0, 8))
def test_only_the_shards_of_a_lost_node_move(nodes, lost):
    shards = [f"shard-{number:06d}.tar" for number in range(200)]
    gone = nodes[lost % len(nodes)]
    left = tuple(sorted(set(nodes) - {gone}))
    for shard in shards:
        before, after = owner_of(shard, tuple(sorted(nodes))), owner_of(shard, left)
        assert after == before or before == gone


def test_shards_are_spread_over_nodes():
    nodes = tuple(f"node-{number}" for number in range(4))
    owners = [owner_of(f"shard-{number:06d}.tar", nodes) for number in range(400)]
    assert all(60 < owners.count(node) < 140 for node in nodes)


def test_a_board_gives_claims_of_silent_loaders_away(monkeypatch):
    async def run():
        board = BoardActor(None)
        assert await board.claim("a", "one")
        assert not await board.claim("a", "two")
        monkeypatch.setattr(ray_board, "_SILENT_S", -1.0)
        assert await board.claim("a", "two")
        await board.post("a", "two", ["ref"], 10)
        assert not await board.claim("a", "three")
        assert await board.wait("a") == ["ref"]

    asyncio.run(run())


def test_a_loader_that_leaves_gives_its_claims_back():
    async def run():
        board = BoardActor(2)
        assert await board.claim("a", "one")
        waiting = asyncio.create_task(board.wait("a"))
        await asyncio.sleep(0)
        await board.leave("one")
        assert await waiting is None
        assert await board.claim("a", "two")

    asyncio.run(run())


def test_who_waits_for_a_silent_loader_is_told_that_nothing_comes(monkeypatch):
    monkeypatch.setattr(ray_board, "_SILENT_S", 0.02)
    monkeypatch.setattr(ray_board, "_LOOK_S", 0.01)

    async def run():
        board = BoardActor(2)
        assert await board.claim("a", "dead")
        assert await board.wait("a") is None

    asyncio.run(run())


def test_what_all_peers_have_is_forgotten():
    async def run():
        board = BoardActor(2)
        assert await board.claim("a", "one")
        await board.post("a", "one", ["ref"], 10)
        assert await board.wait("a") == ["ref"]
        assert await board.wait("a") is None

    asyncio.run(run())


def test_a_loader_that_builds_for_long_and_says_so_keeps_its_claims(monkeypatch):
    async def run():
        now = 100.0
        monkeypatch.setattr(ray_board.time, "monotonic", lambda: now)
        board = BoardActor(None)
        assert await board.claim("a", "one")
        for _ in range(20):
            now += 15.0
            await board.beat("one")
            assert not await board.claim("a", "two")
        now += 25.0
        assert await board.claim("a", "two")

    asyncio.run(run())


RUNS = st.lists(
    st.tuples(st.floats(0.1, 8), st.lists(st.floats(0.01, 1), min_size=1, max_size=30)), min_size=2, max_size=5
)


@given(RUNS)
def test_runs_that_always_want_something_have_their_shares(runs):
    """Until one of them wants no more, they are never further apart than one job of each."""
    shares = Shares()
    for number, (share, jobs) in enumerate(runs):
        shares.add(str(number), share)
        for ticket, seconds in enumerate(jobs):
            shares.put(str(number), ticket, seconds)
    spent = [0.0] * len(runs)
    while all(shares.waits(str(number)) for number in range(len(runs))):
        run, seconds = shares.take()
        shares.spend(run, seconds)
        spent[int(run)] += seconds
        had = [each / share for each, (share, _) in zip(spent, runs, strict=True)]
        assert max(had) - min(had) <= max(max(jobs) / share for share, jobs in runs) * 1.001


def test_a_run_of_many_ranks_has_no_more_than_one_of_few():
    shares = Shares()
    for run, num_ranks in (("large", 64), ("small", 8)):
        for rank in range(num_ranks):
            shares.add(f"{run}-{rank}", 1.0 / num_ranks)
            for ticket in range(100):
                shares.put(f"{run}-{rank}", ticket, run)
    taken = []
    for _ in range(1200):
        run, job = shares.take()
        shares.spend(run, 1.0)
        taken.append(job)
    assert abs(taken.count("large") - 600) <= 64  # one job of each rank


def test_a_run_is_owed_nothing_for_the_time_in_which_it_wanted_nothing():
    shares = Shares()
    for run in ("early", "late"):
        shares.add(run, 1.0)
    for ticket in range(100):
        shares.put("early", ticket, None)
    for _ in range(50):
        shares.spend(shares.take()[0], 1.0)
    for ticket in range(50):
        shares.put("late", ticket, None)
    order = []
    for _ in range(20):
        order.append(shares.take()[0])
        shares.spend(order[-1], 1.0)
    assert order.count("late") == 10
    assert shares.drop("late", 49) is None
    assert len(shares.remove("late")) == 39
    assert shares.drop("late", 48) is None


class Builders:
    """As many as a pool's load asks for; each is busy for as much of its time as there is to do."""

    def __init__(self, least, most, begin):
        self.load, self.now = Load(least, most), 0.0
        self.busy_s = {}
        self.resize(begin)

    def resize(self, number):
        kept = dict(itertools.islice(self.busy_s.items(), number))
        self.busy_s = kept | {f"{self.now}-{each}": 0.0 for each in range(number - len(kept))}

    def work(self, seconds_per_s, periods):
        for _ in range(periods):
            self.now += 10.0
            share = min(seconds_per_s / len(self.busy_s), 1.0)
            self.busy_s = {name: busy + 10.0 * share for name, busy in self.busy_s.items()}
            self.resize(self.load.saw(self.now, self.busy_s, len(self.busy_s)))
        return len(self.busy_s)


def test_a_pool_has_as_many_builders_as_are_busy():
    builders = Builders(2, 40, 2)
    assert 10 < builders.work(10.0, 60) <= 16
    assert builders.work(1000.0, 60) == 40
    assert builders.work(0.0, 60) == 2


def test_a_pool_whose_builders_find_no_room_asks_for_no_more():
    load = Load(1, 100)
    for period in range(1, 20):
        assert load.saw(10.0 * period, {"one": 10.0 * period}, 8) == 8
