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
                self.queues[move.builder].append(move.number)
            elif move.number in self.queues[move.builder]:
                self.queues[move.builder].remove(move.number)
        for builder, queue in self.queues.items():
            if queue and builder not in self.running and builder not in self.stopped:
                number = self.running[builder] = queue.pop(0)
                heapq.heappush(self.events, (self.now + self.costs[number], builder, number))
        if self.schedule.has_next and self.now >= self.ready_at:
            self.taken.append(self.schedule.take(self.now))
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
