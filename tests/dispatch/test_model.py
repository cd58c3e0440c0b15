"""A model of dispatcher, schedule and state: all interleavings that hypothesis can find, on a clock that it moves.

The dispatcher, its schedule, the plan and its states are the real ones; builders are entries of a table, and whatever
happens to them is a rule. Laws: what is delivered is what was planned, each once, in order, through any chain of saves,
resumes and worlds; nobody waits for a builder that is dead; and it always comes to its end.
"""

import itertools
import json
import signal
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.dispatch.jobs import deliver
from tests.plan.conftest import planner, source
from vlm_stream.blueprint import BatchName, Blueprint, Piece, Planned, Work
from vlm_stream.dispatch import Dispatcher, DispatchOptions
from vlm_stream.dispatch import dispatcher as dispatcher_module
from vlm_stream.dispatch.pool import Finished, Joined, Lost, Noted
from vlm_stream.plan import PlainConfig, PlanConfig, StepShape
from vlm_stream.tokens import MediaSizes

HANG_S = 20.0
MICRO = 2
picks = st.integers(0, 7)


def blueprint_of(step, rank, micro):
    rows = tuple(
        tuple(Piece(tuple(ref), str(ref), 0, None, MediaSizes(), ()) for ref in row) for row in step.refs(rank, micro)
    )
    return Blueprint(
        name=BatchName("plan", step.index, rank, micro),
        rows=rows,
        dropped=(),
        work=Work(len(rows), 10, 100, 0, 0),
        labels=None,
        step_labels=None,
        num_in_step=1,
    )


def planned(plan, shape, rank, state):
    for step in plan.steps(shape, state):
        for micro in range(step.micro_begin, shape.micro_batches):
            yield Planned(blueprint_of(step, rank, micro), partial(step.state_after, micro))


def refs_in(blueprint):
    return [piece.ref for row in blueprint.rows for piece in row]


class Table:
    """A pool whose builders do what the rules say."""

    nearness = None

    def __init__(self, listener):
        self.listener = listener
        self.numbers = itertools.count()
        self.starting, self.queues, self.ending, self.hung, self.asleep = {}, {}, {}, set(), set()

    def grow(self, *, is_reserve=False):
        number = next(self.numbers)
        self.starting[number] = "reserve" if is_reserve else "usual"
        return number

    def give(self, builder, number, blueprint, skipped):
        if builder in self.queues:
            self.queues[builder].append((number, blueprint, skipped))

    def drop(self, builder, number):
        self.queues[builder] = [job for at, job in enumerate(self.queues[builder]) if job[0] != number or at == 0]

    def stop(self, builder, why=""):
        self.ending[builder] = why

    def suspended(self):
        return self.asleep

    def pids(self):
        return []

    def close(self):
        self.queues.clear()

    def busy(self):
        return [builder for builder, queue in self.queues.items() if queue and builder not in self.hung]

    def join(self, builder):
        kind = self.starting.pop(builder)
        self.queues[builder] = []
        self.listener(Joined(builder, kind))

    def lose(self, builder, exit_code, *, blames=False):
        queue = self.queues.pop(builder)
        self.hung.discard(builder)
        self.asleep.discard(builder)
        self.ending.pop(builder, None)
        noted = Noted(refs_in(queue[0][1])[0], 1.0) if blames and queue and refs_in(queue[0][1]) else None
        self.listener(Lost(builder, "died", exit_code, noted))

    def build(self, builder):
        number, blueprint, skipped = self.queues[builder].pop(0)
        batch = {"left": [ref for ref in refs_in(blueprint) if ref in skipped]}
        batch["refs"] = [ref for ref in refs_in(blueprint) if ref not in skipped]
        self.listener(Finished(builder, number, deliver(blueprint, batch, 0.05), 0))

    def flush(self):
        """Let builders that were told to end be gone."""
        for builder in list(self.ending):
            if builder in self.queues:
                self.lose(builder, None if self.ending[builder] else -signal.SIGKILL)
            elif builder in self.starting:
                kind = self.starting.pop(builder)
                self.listener(Lost(builder, self.ending.pop(builder), None, None, kind))
            self.ending.pop(builder, None)


class Rank:
    def __init__(self, plan, shape, rank, state, num_workers):
        self.expected = planned(plan, shape, rank, state)

        def open_pool(listener):
            self.table = Table(listener)
            return self.table

        options = DispatchOptions(num_workers=num_workers, hang_s=HANG_S, max_restarts=100_000, max_bytes=1500)
        self.dispatcher = Dispatcher(planned(plan, shape, rank, state), open_pool, options)

    @property
    def schedule(self):
        return self.dispatcher._schedule

    def settle(self):
        """Wait until the thread that plans has done what it can."""
        while True:
            with self.dispatcher._changed:
                if self.dispatcher._has_plan_ended or not self.schedule.wants_plan:
                    return
                self.dispatcher._changed.notify_all()
            time.sleep(0)

    def wait_once(self):
        """Do what a trainer that waits does, ten times a second."""
        with self.dispatcher._changed:
            self.schedule.is_waited_for = not self.schedule.has_next
            self.dispatcher._look_for_hangs()
            self.dispatcher._move()
            self.schedule.is_waited_for = False

    @property
    def has_ended(self):
        return self.dispatcher._has_plan_ended and self.schedule.is_empty

    def take(self):
        given, delivery = next(self.dispatcher)
        wanted = next(self.expected)
        assert delivery.name == wanted.blueprint.name == given.blueprint.name
        assert sorted(delivery.batch["refs"] + delivery.batch["left"]) == sorted(refs_in(wanted.blueprint))
        return given, refs_in(wanted.blueprint)


class Run(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.real = dispatcher_module.time, dispatcher_module._START_S, dispatcher_module._PORTION
        dispatcher_module.time = SimpleNamespace(monotonic=lambda: self.now)
        dispatcher_module._START_S = 1e9  # starts take as long as the rules let them
        dispatcher_module._PORTION = 1  # what is planned is what the rules ask for, and nothing more
        self.ranks = []

    def plan(self):
        sources = [source("caption", [9, 7, 8]), source("video", [5])]
        return planner(sources, PlanConfig(seed=1, window=16, mode=PlainConfig()), lengths=lambda rng, n: [10] * n)

    def start(self, world, workers):
        for rank in self.ranks:
            rank.dispatcher.close()
        state, self.seen = self.saved
        self.seen = list(self.seen)
        self.newest = state
        shape = StepShape(world_size=world, micro_batches=MICRO, batch_size=1)
        plan = self.plan()
        self.ranks = [Rank(plan if not n else self.plan(), shape, n, state, workers) for n in range(world)]
        self.settle()

    def settle(self):
        for rank in self.ranks:
            rank.settle()

    def pick(self, rank, among, number):
        found = sorted(among(self.ranks[rank % len(self.ranks)].table))
        return (self.ranks[rank % len(self.ranks)].table, found[number % len(found)]) if found else (None, None)

    @initialize(world=st.integers(1, 3), workers=st.integers(1, 3))
    def begin(self, world, workers):
        self.saved = (None, [])
        self.start(world, workers)

    @rule(rank=picks, number=picks)
    def join(self, rank, number):
        table, builder = self.pick(rank, lambda table: table.starting, number)
        if table is not None:
            table.join(builder)

    @rule(rank=picks, number=picks)
    def fail_to_start(self, rank, number):
        table, builder = self.pick(rank, lambda table: table.starting, number)
        if table is not None:
            kind = table.starting.pop(builder)
            table.listener(Lost(builder, "could not be started", 1, None, kind))

    @rule(rank=picks, number=picks)
    def build(self, rank, number):
        table, builder = self.pick(rank, Table.busy, number)
        if table is not None:
            table.build(builder)

    @rule(rank=picks, number=picks, how=st.sampled_from([-signal.SIGKILL, -signal.SIGSEGV, 1]), blames=st.booleans())
    def die(self, rank, number, how, blames):
        table, builder = self.pick(rank, lambda table: table.queues, number)
        if table is not None:
            table.lose(builder, how, blames=blames)

    @rule(rank=picks, number=picks)
    def hang(self, rank, number):
        table, builder = self.pick(rank, lambda table: table.queues, number)
        if table is not None:
            table.hung.add(builder)

    @rule(rank=picks, number=picks)
    def suspend(self, rank, number):
        table, builder = self.pick(rank, lambda table: table.queues, number)
        if table is not None:
            table.hung.add(builder)
            table.asleep.add(builder)

    @rule(rank=picks, number=picks)
    def wake(self, rank, number):
        table, builder = self.pick(rank, lambda table: table.hung, number)
        if table is not None:
            table.hung.discard(builder)
            table.asleep.discard(builder)

    @rule(seconds=st.sampled_from([0.05, 0.5, 5.0, 30.0]))
    def pass_time(self, seconds):
        self.now += seconds

    @rule()
    def wait(self):
        for rank in self.ranks:
            rank.wait_once()

    @rule()
    def end_those_that_were_told(self):
        for rank in self.ranks:
            rank.table.flush()

    @rule(workers=st.integers(1, 4))
    def set_workers(self, workers):
        for rank in self.ranks:
            rank.dispatcher.set_workers(workers)

    @precondition(lambda self: self.ranks and all(rank.schedule.has_next for rank in self.ranks))
    @rule()
    def deliver(self):
        taken = [rank.take() for rank in self.ranks]
        states = {json.dumps(given.state(), sort_keys=True) for given, _ in taken}
        assert len(states) == 1  # the state is the same on every rank
        self.newest = json.loads(states.pop())
        self.seen += [ref for _, refs in taken for ref in refs]
        self.settle()

    @rule()
    def save(self):
        self.saved = (self.newest, list(self.seen))

    @rule(world=st.integers(1, 3), workers=st.integers(1, 3))
    def resume(self, world, workers):
        self.start(world, workers)

    @invariant()
    def nobody_waits_for_the_dead(self):
        for rank in self.ranks:
            assert rank.dispatcher._error is None
            table, schedule = rank.table, rank.schedule
            assert set(schedule._builders) <= set(table.queues)
            for builder, queue in table.queues.items():
                known = schedule.queued(builder)
                had = [number for number, *_ in queue if number in known]
                assert had[len(had) - len(known) :] == known  # what a suspended one works on it may get again

    @invariant()
    def nothing_is_begun_twice_in_silence(self):
        for rank in self.ranks:
            begun = Counter(number for queue in rank.table.queues.values() for number, *_ in queue)
            assert sum(begun.values()) - len(begun) <= 2 * rank.schedule.num_twice + len(rank.table.hung) * 16

    def teardown(self):
        try:
            for _ in range(400):
                if self.ranks and not all(rank.has_ended for rank in self.ranks):
                    self.one_turn()
            assert all(rank.has_ended for rank in self.ranks), "it does not come to its end"
            wanted = Counter(tuple(ref) for step in self.plan().steps(StepShape()) for ref in step.refs(0, 0)[0])
            if self.ranks:
                assert Counter(self.seen) == wanted
        finally:
            for rank in self.ranks:
                rank.dispatcher.close()
            dispatcher_module.time, dispatcher_module._START_S, dispatcher_module._PORTION = self.real

    def one_turn(self):
        """Let everything that lives do its work; what hangs stays as it is."""
        self.now += 0.5
        for rank in self.ranks:
            rank.table.flush()
            for builder in list(rank.table.starting):
                rank.table.join(builder)
            rank.wait_once()
            for builder in rank.table.busy():
                rank.table.build(builder)
        while all(rank.schedule.has_next for rank in self.ranks):
            self.deliver()


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
