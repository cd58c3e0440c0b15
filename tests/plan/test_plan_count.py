"""Counting what is left of a stream: the same number as walking through it, from anywhere, for any shape."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.test_resume_laws import balances, modes, plan_of, shapes, small_chunks, stops  # noqa: F401
from vlm_stream.plan import StepShape


def walk(steps):
    steps = list(steps)
    return len(steps), sum(step.shape.micro_batches - step.micro_begin for step in steps)


@settings(max_examples=60, deadline=None)
@given(mode=modes, shape=shapes, balance=balances, stop=stops, epochs=st.integers(1, 3))
def test_a_whole_stream(make, mode, shape, balance, stop, epochs):
    plan = plan_of(make, mode, balance=balance, stop=stop, epochs=epochs)
    count = plan.count(shape)
    assert (count.steps, count.micro_batches) == walk(plan.steps(shape))


@settings(max_examples=60, deadline=None)
@given(mode=modes, shape=shapes, other=shapes, balance=balances, stop=stops, data=st.data())
def test_the_rest_after_a_state_with_the_same_or_another_shape(make, mode, shape, other, balance, stop, data):
    plan = plan_of(make, mode, balance=balance, stop=stop, window=64)
    steps = list(plan.steps(shape))
    at = data.draw(st.integers(0, len(steps) - 1))
    state = json.loads(json.dumps(steps[at].state_after(data.draw(st.integers(0, shape.micro_batches - 1)))))
    for going_on in (shape, other):
        count = plan.count(going_on, state)
        assert (count.steps, count.micro_batches) == walk(plan.steps(going_on, state))


@settings(max_examples=20, deadline=None)
@given(mode=modes, stop=stops)
def test_rounds_are_counted_one_after_the_other(make, mode, stop):
    shape = StepShape(world_size=2, micro_batches=2)
    state, counted = None, None
    for epochs in (1, 2, 3):
        plan = plan_of(make, mode, stop=stop, epochs=epochs)
        count = plan.count(shape, counted)
        steps = list(plan.steps(shape, state))
        assert (count.steps, count.micro_batches) == walk(steps)
        counted = count.end
        state = steps[-1].state_after() if steps else state
