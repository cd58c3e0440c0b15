"""The laws of resuming: stop anywhere, go on with any world, and the rest comes exactly once."""

from __future__ import annotations

import json
from collections import Counter
from unittest.mock import patch

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
from vlm_stream.plan import units as units_module

MODES = [
    PackConfig(pack_size=8192),
    PackConfig(pack_size=6000, vision_size=2000, alignment=8, packing_ratio=0.95, long_samples="truncate"),
    PlainConfig(),
    GroupConfig(),
    GroupConfig(token_budget=16384),
]

shapes = st.builds(
    StepShape,
    world_size=st.integers(1, 17),
    micro_batches=st.integers(1, 4),
    batch_size=st.integers(1, 3),
)
modes = st.sampled_from(MODES)


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Let a small window hold several chunks of grouped units."""
    with patch.object(units_module, "CHUNK_UNITS", 8):
        yield


balances = st.builds(
    BalanceConfig,
    barrier=st.sampled_from(["step", "micro", "none"]),
    horizon=st.integers(1, 3),
)
stops = st.sampled_from(["first", "all", "each"])


def plan_of(make, mode, *, seed=3, balance=None, stop="each", window=128, epochs=1, weight=1.0):
    sources = [
        make.source("caption", [40] * 9 + [13], weight=weight),
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
    plan = plan_of(make, mode, balance=balance, stop=stop, epochs=2, window=64)
    steps = list(plan.steps(shape))
    at = data.draw(st.integers(0, len(steps) - 1))
    micro = data.draw(st.integers(0, shape.micro_batches - 1))
    state = json.loads(json.dumps(steps[at].state_after(micro)))

    rest = list(plan_of(make, mode, balance=balance, stop=stop, epochs=2, window=64).steps(shape, state))

    expected = [(s.index, s.epoch, *row) for s in steps[at:] for row in make.rows(s)]
    expected = [row for row in expected if (row[0], row[2]) > (steps[at].index, micro)]
    assert [(s.index, s.epoch, *row) for s in rest for row in make.rows(s)] == expected
    states = {(s.index, m): s.state_after(m) for s in steps for m in range(shape.micro_batches)}
    notes = {s.index: s.dropped for s in steps}
    for step in rest:
        micros = range(step.micro_begin, shape.micro_batches)
        assert [step.state_after(m) for m in micros] == [states[step.index, m] for m in micros]
        assert step.dropped == (() if step.micro_begin else notes[step.index])  # told with a step's first micro-batch


@settings(max_examples=30, deadline=None)
@given(
    mode=modes,
    chain=st.lists(shapes, min_size=2, max_size=5),
    balance=balances,
    stop=stops,
    epochs=st.integers(1, 2),
    data=st.data(),
)
def test_any_chain_of_worlds_delivers_everything_once(make, mode, chain, balance, stop, epochs, data):

    def plan_with(weight):
        return plan_of(make, mode, balance=balance, stop=stop, epochs=epochs, weight=weight)

    # Where each source is delivered exactly, weights may change with every resume.
    weights = st.sampled_from([0.2, 1.0, 5.0]) if stop == "each" else st.just(1.0)
    plan = plan_with(1.0)
    whole = Counter(ref for unit in make.stream(plan) for ref in unit)
    told = Counter(note for step in plan.steps(StepShape()) for note in step.dropped)
    seen: Counter = Counter()
    notes: Counter = Counter()
    state = None
    for shape in chain[:-1]:
        plan = plan_with(data.draw(weights)) if state else plan
        for step in plan.steps(shape, state):
            notes.update(step.dropped)
            micro = data.draw(st.integers(step.micro_begin, shape.micro_batches - 1))
            stop_here = data.draw(st.booleans())
            done = [units for m, _, units in make.rows(step) if not stop_here or m <= micro]
            seen.update(ref for units in done for unit in units if unit for ref in unit.refs)
            state = json.loads(json.dumps(step.state_after(micro if stop_here else None)))
            if stop_here:
                break
    rest = list(plan.steps(chain[-1], state))
    seen.update(make.refs(rest))
    notes.update(note for step in rest for note in step.dropped)
    assert seen == whole
    assert notes == told


@settings(max_examples=30, deadline=None)
@given(mode=modes, shape=shapes, balance=balances)
def test_refs_and_tokens_are_those_of_the_units(make, mode, shape, balance):
    for step in plan_of(make, mode, balance=balance).steps(shape):
        for micro, rank, units in make.rows(step):
            assert step.refs(rank, micro) == [unit.refs if unit else () for unit in units]
            assert step.tokens(rank, micro) == sum(unit.tokens for unit in units if unit)


@pytest.mark.parametrize("mode", MODES)
def test_stream_does_not_know_the_world(make, mode):
    plan = plan_of(make, mode)
    stream = make.stream(plan)
    for world in range(1, 18):
        shape = StepShape(world_size=world, micro_batches=1 + world % 3, batch_size=1 + world % 2)
        units = [u.refs for step in plan.steps(shape) for _, _, row in make.rows(step) for u in row if u]
        assert Counter(units) == Counter(stream)
