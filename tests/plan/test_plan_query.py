"""Queries: the samples of a step and the step of a sample agree with the run itself."""

from __future__ import annotations

import pytest

from vlm_stream.errors import InputError, StateError
from vlm_stream.plan import (
    BalanceConfig,
    MixtureConfig,
    PackConfig,
    PlainConfig,
    PlanConfig,
    StepShape,
    find_samples,
    samples_of_step,
)

SHAPE = StepShape(world_size=3, micro_batches=2)


@pytest.fixture(scope="module", params=["packed", "plain", "horizon"])
def plan(make, request):
    sources = [make.source("a", [40] * 10), make.source("b", [20] * 10)]
    config = PlanConfig(
        window=100,
        mode=PlainConfig() if request.param == "plain" else PackConfig(pack_size=8192, long_samples="truncate"),
        mixture=MixtureConfig(stop="each"),
        balance=BalanceConfig(horizon=3 if request.param == "horizon" else 1),
    )
    return make.planner(sources, config)


def test_samples_of_a_step(make, plan):
    steps = list(plan.steps(SHAPE))
    for step in (steps[0], steps[5], steps[-1]):
        found = samples_of_step(plan, SHAPE, step.index)
        assert [d.ref for d in found] == make.refs([step])
        assert all(d.step == step.index for d in found)
        mine = samples_of_step(plan, SHAPE, step.index, rank=1)
        assert [d.ref for d in mine] == [ref for micro in range(2) for row in step.refs(1, micro) for ref in row]


def test_samples_of_a_step_from_a_state(make, plan):
    steps = list(plan.steps(SHAPE))
    state = steps[4].state_after(0)
    found = samples_of_step(plan, SHAPE, 6, state=state)
    assert [d.ref for d in found] == make.refs([steps[6]])
    rest = samples_of_step(plan, SHAPE, 4, state=state)
    assert {d.micro for d in rest} == {1}


def test_the_step_of_a_sample(plan):
    steps = list(plan.steps(SHAPE))
    for step in (steps[0], steps[7], steps[-1]):
        found = samples_of_step(plan, SHAPE, step.index)[::7]
        assert find_samples(plan, SHAPE, [delivery.ref for delivery in found]) == found
        assert find_samples(plan, SHAPE, [found[-1].ref]) == found[-1:]
    early, late = (samples_of_step(plan, SHAPE, number)[0] for number in (0, 7))
    assert find_samples(plan, SHAPE, [early.ref, late.ref], state=steps[3].state_after()) == (late,)
    assert find_samples(plan, SHAPE, []) == ()


def test_refusals(plan):
    with pytest.raises(InputError, match="Step 100000 is not ahead"):
        samples_of_step(plan, SHAPE, 100_000)
    state = next(step for step in plan.steps(SHAPE) if step.index == 5).state_after()
    with pytest.raises(InputError, match="Step 2 is not ahead"):
        samples_of_step(plan, SHAPE, 2, state=state)
    found = next(step for step in plan.search(SHAPE, None, lambda first, horizon: first >= 3))
    with pytest.raises(StateError, match="Steps found by a search have no state"):
        found.state_after()
