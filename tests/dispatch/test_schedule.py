"""The dispatcher's rules, on a simulated clock: every batch once, in order, within the limit, and none idles."""

import heapq
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.dispatch.schedule import Schedule


class Simulation:
    """Builders that take known times, on a clock that jumps from event to event."""

    def __init__(self, costs, num_builders, *, max_bytes=1 << 40, estimates=None, consume_s=0.0, sizes=None):
        self.given = []
        self.longest_wait = 0.0
        self.costs, self.estimates = costs, estimates or costs
        self.sizes = sizes or [1] * len(costs)
        self.schedule = Schedule(max_bytes)
        self.now = self.ready_at = 0.0
        self.consume_s = consume_s
        self.events, self.taken = [], []
        self.queues, self.running = defaultdict(list), {}
        self.num_planned = self.num_twice = self.peak = 0
        self.stopped = set()
        for number in range(num_builders):
            self.schedule.add_builder(number)

    def run(self, on_tick=None):
        while len(self.taken) < len(self.costs):
            if on_tick is not None:
                on_tick(self)
            while self._progress():
                pass
            self.peak = max(self.peak, self.schedule._num_bytes)
            ahead = [self.now + 0.05, *(when for when, *_ in self.events[:1])]
            if self.schedule.has_next:
                ahead.append(max(self.ready_at, self.now))
            self.now = min(ahead)
            while self.events and self.events[0][0] <= self.now:
                _, builder, number = heapq.heappop(self.events)
                if builder in self.stopped or self.running.get(builder) != number:
                    continue
                del self.running[builder]
                first = self.schedule.finish(
                    builder, number, self.now, result=number, num_bytes=self.sizes[number], fetch_share=0.0
                )
                self.num_twice += not first
        assert self.taken == list(range(len(self.costs)))
        return self.now / (sum(self.costs) / max(len(self.schedule._builders), 1))

    def _progress(self):
        moved = False
        while self.num_planned < len(self.costs) and self.schedule.wants_plan:
            number = self.num_planned
            self.schedule.plan(self.estimates[number], self.sizes[number], 1)
            self.num_planned += 1
        self.schedule.is_waited_for = self.now >= self.ready_at and not self.schedule.has_next
        for move in self.schedule.moves(self.now):
            moved = True
            if not move.is_drop:
                self.given.append((move.builder, move.number))
                self.queues[move.builder].append(move.number)
            elif move.number in self.queues[move.builder]:
                self.queues[move.builder].remove(move.number)
        for builder, queue in self.queues.items():
            if queue and builder not in self.running and builder not in self.stopped:
                number = self.running[builder] = queue.pop(0)
                heapq.heappush(self.events, (self.now + self.costs[number], builder, number))
        if self.schedule.has_next and self.now >= self.ready_at:
            self.taken.append(self.schedule.take(self.now))
            self.longest_wait = max(self.longest_wait, self.now - self.ready_at)
            self.ready_at = self.now + self.consume_s
            moved = True
        return moved


def heavy(count=1000, seed=0):
    draw = random.Random(seed)
    return [1.0 if draw.random() < 0.04 else 0.02 for _ in range(count)]


def lognormal(count=1000, seed=0):
    draw = random.Random(seed)
    return [0.05 * draw.lognormvariate(0, 1.2) for _ in range(count)]


@pytest.mark.parametrize("costs", [heavy(), lognormal()], ids=["heavy", "lognormal"])
def test_known_costs_leave_no_builder_idle(costs):
    assert Simulation(costs, 8).run() < 1.02


@pytest.mark.parametrize("costs", [heavy(), lognormal()], ids=["heavy", "lognormal"])
def test_wrong_estimates_only_cost_time(costs):
    mean = sum(costs) / len(costs)
    run = Simulation(costs, 8, estimates=[mean] * len(costs))
    assert run.run() < 1.25
    assert run.num_twice < 10


def test_what_takes_long_is_begun_early():
    costs = [0.02] * 400
    costs[200] = 1.5
    run = Simulation(costs, 2)
    run.run()
    assert run.now < sum(costs) / 2 * 1.03
    blind = Simulation(costs, 2, estimates=[0.02] * 400, max_bytes=20)
    blind.run()
    assert blind.now > run.now + 0.5  # begun in its turn, it keeps all others waiting


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.floats(0.001, 2.0), min_size=1, max_size=80),
    noise=st.floats(0.1, 10.0),
    num_builders=st.integers(1, 6),
    limit=st.integers(1, 40),
    consume_s=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_every_batch_comes_once_in_order_within_the_limit(costs, noise, num_builders, limit, consume_s):
    estimates = [cost * (noise if number % 2 else 1 / noise) for number, cost in enumerate(costs)]
    run = Simulation(costs, num_builders, max_bytes=limit, estimates=estimates, consume_s=consume_s)
    run.run()
    assert run.peak <= max(limit, num_builders) + 1
    assert run.schedule._num_bytes == run.schedule._num_begun == run.schedule._samples_waiting == 0
    assert run.schedule.is_empty


def test_a_batch_that_was_begun_past_the_limit_leaves_nothing_behind():
    costs = [1.0] * 6 + [2.0, 1.0, 2.0, 1.0, 1.0]
    estimates = [cost * (0.25 if number % 2 else 4) for number, cost in enumerate(costs)]
    Simulation(costs, 1, max_bytes=1, estimates=estimates).run()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), costs=st.lists(st.floats(0.005, 0.5), min_size=10, max_size=80))
def test_builders_that_come_go_and_stop_lose_nothing(data, costs):
    run = Simulation(costs, 3)
    names = iter(range(3, 1000))

    def disturb(run):
        what = data.draw(st.sampled_from(["nothing"] * 12 + ["lose", "add", "stop", "retire"]))
        alive = [n for n in run.schedule._builders if n not in run.stopped]
        if what == "add" or len(alive) < 2:
            run.schedule.add_builder(next(names))
        elif what == "lose":
            gone = data.draw(st.sampled_from(alive))
            run.schedule.remove_builder(gone)
            run.running.pop(gone, None)
            run.queues.pop(gone, None)
        elif what == "stop" and len(run.stopped) < 5:
            run.stopped.add(data.draw(st.sampled_from(alive)))
        elif what == "retire" and len(alive) > 2:
            run.schedule.retire_builder(data.draw(st.sampled_from(alive)))
            run.schedule.add_builder(next(names))
        for number in run.schedule.hung(run.now):
            run.schedule.remove_builder(number)
            run.queues.pop(number, None)
        if run.now > 300:
            pytest.fail("it does not end")

    run.run(disturb)


def test_a_stopped_builder_loses_its_batch_to_another_one():
    run = Simulation([0.05] * 200, 4)

    def stop(run):
        if len(run.taken) == 100:
            run.stopped.add(0)

    run.run(stop)
    assert run.now < 200 * 0.05 / 3 + 1.0
    assert run.schedule.hung(run.now + 60) == [0]


@pytest.mark.parametrize(("num_usual", "num_reserves"), [(4, 0), (3, 1)])
def test_a_stopped_builder_costs_about_one_build_more_also_after_a_long_batch(num_usual, num_reserves):
    costs = [0.25] * 400
    costs[50] = 10.0
    run = Simulation(costs, num_usual, consume_s=0.1, max_bytes=40)
    for number in range(num_reserves):
        run.schedule.add_builder(num_usual + number, is_reserve=True)

    def stop(run):
        if len(run.taken) < 200:
            run.longest_wait = 0.0
        elif not run.stopped:
            run.stopped.update(list(run.running)[:1])

    run.run(stop)
    assert run.stopped
    assert run.longest_wait < 4 * 0.25


@pytest.mark.parametrize("seed", range(4))
def test_a_builder_that_is_seen_to_be_suspended_costs_one_build_more(seed):
    draw = random.Random(seed)
    run = Simulation([0.2 + 0.2 * draw.random() for _ in range(200)], 4, max_bytes=40)

    def suspend(run):
        if len(run.taken) == 100 and not run.stopped and run.schedule.is_waited_for:
            run.stopped.update(run.schedule._batches[run.schedule.head].builders)
        run.schedule.note_suspended(run.stopped, run.now)

    run.run(suspend)
    assert len(run.stopped) == 1
    assert run.longest_wait <= 2 * 0.4


def test_what_a_suspended_builder_has_is_given_to_others_and_it_may_come_back():
    schedule = Schedule(1 << 40)
    for number in range(2):
        schedule.plan(1.0, 1, 1)
        schedule.add_builder(number)
    assert [(move.builder, move.number) for move in schedule.moves(0.0)] == [(0, 0), (1, 1)]
    schedule.is_waited_for = True
    assert schedule.note_suspended([0], 0.2) == []
    assert [tuple(move)[:3] for move in schedule.moves(0.2)] == [(0, 0, True)]
    schedule.finish(1, 1, 1.0, result=1, num_bytes=1, fetch_share=0.0)
    schedule.plan(1.0, 1, 1)
    assert [(move.builder, move.number) for move in schedule.moves(1.0)] == [(1, 0)]  # first what is waited for
    assert schedule.num_twice == 1
    assert schedule.note_suspended([0], 10.1) == []
    assert schedule.note_suspended([0], 10.3) == [0]
    assert schedule.finish(0, 0, 10.4, result=0, num_bytes=1, fetch_share=0.0)  # it went on, and was first after all
    assert [(move.builder, move.number) for move in schedule.moves(10.4)] == [(0, 2)]


@pytest.mark.parametrize("noise", [0.3, 0.7])
@pytest.mark.parametrize("costs", [heavy(), lognormal()], ids=["heavy", "lognormal"])
def test_estimates_that_are_off_make_few_second_copies(costs, noise):
    draw = random.Random(1)
    run = Simulation(costs, 8, estimates=[cost * draw.lognormvariate(0, noise) for cost in costs])
    run.run()
    assert run.schedule.num_twice < len(costs) / 100


@pytest.mark.parametrize("consume_s", [0.0, 0.03])
@pytest.mark.parametrize("costs", [heavy(), lognormal()], ids=["heavy", "lognormal"])
def test_builders_get_what_lies_near_to_them_and_nobody_waits_longer(costs, consume_s):
    draw = random.Random(5)
    home = [draw.randrange(8) for _ in costs]
    far = Simulation(costs, 8, consume_s=consume_s)
    run = Simulation(costs, 8, consume_s=consume_s)
    run.schedule.nearness = lambda builder, number: float(home[number] == builder)
    assert run.run() < far.run() * 1.02
    assert sum(home[number] == builder for builder, number in run.given) > 0.5 * len(run.given)  # by chance: 1 / 8


def test_a_builder_that_nobody_can_help_is_named_with_growing_patience():
    schedule = Schedule(1 << 40)
    schedule.add_builder(0)
    schedule.plan(1.0, 1, 1)
    assert len(list(schedule.moves(0.0))) == 1
    assert schedule.left_alone(60.0, 1.0) is None
    assert schedule.left_alone(90.0, 1.0) == 0
    assert schedule.left_alone(90.0, 2.0) is None
    assert schedule.left_alone(180.0, 2.0) == 0
    schedule.add_builder(1)
    assert schedule.left_alone(180.0, 1.0) is None  # it will be given the batch
    schedule.is_waited_for = True
    assert [(move.builder, move.late) for move in schedule.moves(180.0)] == [(1, 0)]
    schedule.add_builder(2)
    assert schedule.left_alone(180.0, 1.0) == 0  # a third copy is not made
    schedule.remove_builder(0)
    assert schedule.left_alone(185.0, 1.0) is None
    schedule.finish(1, 0, 186.0, result=0, num_bytes=1, fetch_share=0.0)
    assert schedule.left_alone(999.0, 1.0) is None


def test_a_builder_that_is_silent_over_a_finished_batch_goes_sooner_when_no_other_one_is_free():
    schedule = Schedule(1 << 40)
    for number in range(2):
        schedule.plan(1.0, 1, 1)
        schedule.add_builder(number)
    assert [(move.builder, move.number) for move in schedule.moves(0.0)] == [(0, 0), (1, 1)]
    schedule.finish(1, 1, 1.0, result=1, num_bytes=1, fetch_share=0.0)
    schedule.is_waited_for = True
    assert [(move.builder, move.late) for move in schedule.moves(15.0)] == [(1, 0)]
    schedule.finish(1, 0, 16.0, result=0, num_bytes=1, fetch_share=0.0)
    schedule.plan(1.0, 1, 1)
    assert [(move.builder, move.number) for move in schedule.moves(16.0)] == [(1, 2)]
    assert schedule.hung(17.0) == []
    assert schedule.hung(18.5) == [0]  # builder 1 takes long, too
    schedule.add_builder(2)
    assert schedule.hung(18.5) == []
    assert schedule.hung(20.5) == [0]
