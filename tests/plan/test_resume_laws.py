"""The laws of resuming: stop anywhere, go on with any world, and the rest comes exactly once."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.plan import (
    BalanceConfig,
    GroupConfig,
    MixtureConfig,
    OrderConfig,
    PackConfig,
    PlainConfig,
    PlanConfig,
    StepShape,
)

MODES = [
    PackConfig(pack_size=8192),
    PackConfig(pack_size=6000, vision_size=2000, alignment=8, packing_ratio=0.95, long_samples="truncate"),
    PlainConfig(),
    GroupConfig(block_units=32),
    GroupConfig(token_budget=16384, block_units=4),
]

shapes = st.builds(
    StepShape,
    world_size=st.integers(1, 17),
    micro_batches=st.integers(1, 4),
    batch_size=st.integers(1, 3),
)
modes = st.sampled_from(MODES)
balances = st.builds(
    BalanceConfig,
    barrier=st.sampled_from(["step", "micro", "none"]),
    horizon=st.integers(1, 3),
    small_ends=st.booleans(),
)
stops = st.sampled_from(["first", "all", "each"])


def plan_of(make, mode, *, seed=3, balance=None, stop="each", window=128, epochs=1):
    sources = [
        make.source("caption", [40] * 9 + [13]),
        make.source("ocr", [25] * 5, weight=0.5, sample_ratio=0.6),
        make.source("video", [7] * 6, weight=2.0, sample_ratio=1.5),
    ]
    config = PlanConfig(
        seed=seed,
        window=window,
        epochs=epochs,
        mode=mode,
        order=OrderConfig(group_shards=3),
        mixture=MixtureConfig(weigh_by="size", stop=stop),
        balance=balance or BalanceConfig(),
    )
    return make.planner(sources, config)


@settings(max_examples=40, deadline=None)
@given(mode=modes, shape=shapes, balance=balances, stop=stops, data=st.data())
def test_same_shape_goes_on_bit_equal(make, mode, shape, balance, stop, data):
    plan = plan_of(make, mode, balance=balance, stop=stop)
    steps = list(plan.steps(shape))
    at = data.draw(st.integers(0, len(steps) - 1))
    micro = data.draw(st.integers(0, shape.micro_batches - 1))
    state = json.loads(json.dumps(steps[at].state_after(micro)))

    rest = list(plan_of(make, mode, balance=balance, stop=stop).steps(shape, state))

    expected = [(s.index, s.epoch, *row) for s in steps[at:] for row in make.rows(s)]
    expected = [row for row in expected if (row[0], row[2]) > (steps[at].index, micro)]
    assert [(s.index, s.epoch, *row) for s in rest for row in make.rows(s)] == expected
    if rest:
        assert rest[-1].state_after() == steps[-1].state_after()


@settings(max_examples=40, deadline=None)
@given(mode=modes, chain=st.lists(shapes, min_size=2, max_size=5), balance=balances, stop=stops, data=st.data())
def test_any_chain_of_worlds_delivers_everything_once(make, mode, chain, balance, stop, data):
    plan = plan_of(make, mode, balance=balance, stop=stop)
    whole = Counter(ref for unit in make.stream(plan) for ref in unit)
    seen: Counter = Counter()
    state = None
    for shape in chain[:-1]:
        for step in plan.steps(shape, state):
            micro = data.draw(st.integers(step.micro_begin, shape.micro_batches - 1))
            stop_here = data.draw(st.booleans())
            done = [units for m, _, units in make.rows(step) if not stop_here or m <= micro]
            seen.update(ref for units in done for unit in units if unit for ref in unit.refs)
            state = json.loads(json.dumps(step.state_after(micro if stop_here else None)))
            if stop_here:
                break
    seen.update(make.refs(plan.steps(chain[-1], state)))
    assert seen == whole


@pytest.mark.parametrize("mode", MODES)
def test_stream_does_not_know_the_world(make, mode):
    plan = plan_of(make, mode)
    stream = make.stream(plan)
    for world in range(1, 18):
        shape = StepShape(world_size=world, micro_batches=1 + world % 3, batch_size=1 + world % 2)
        units = [u.refs for step in plan.steps(shape) for _, _, row in make.rows(step) for u in row if u]
        assert Counter(units) == Counter(stream)
