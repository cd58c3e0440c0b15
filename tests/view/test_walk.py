"""Steps of a plan in any order are those of the plan, from the start or from a state, by noted cursors or without."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.errors import InputError
from vlm_stream.options import StreamOptions
from vlm_stream.planning import open_plan
from vlm_stream.recipe import normalise_sources
from vlm_stream.view import walk as walk_module
from vlm_stream.view.walk import Walk


def contents(step):
    shape = step.shape
    return [step.refs(rank, micro) for rank in range(shape.world_size) for micro in range(shape.micro_batches)]


@settings(max_examples=25)
@given(
    st.sampled_from([{}, {"window": 16}, {"mode": "grouped", "batch_size": 2}, {"horizon": 3, "window": 8}]),
    st.integers(1, 3),
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.integers(0, 6),
    st.booleans(),
)
def test_any_order_gives_the_steps_of_the_plan(mixed_shards, changes, world, asked, begin, is_noted):
    before = walk_module._NOTED, walk_module._KEPT_STEPS, walk_module._MAX_NOTES
    walk_module._NOTED, walk_module._KEPT_STEPS, walk_module._MAX_NOTES = 1, 2, 5
    try:
        options = StreamOptions(pack_size=700, **changes)
        plan = open_plan(normalise_sources(mixed_shards), options)
        shape = options.shape(world)
        steps = list(plan.after(0).planner.steps(shape))
        begin = min(begin, len(steps))
        state = steps[begin - 1].state_after() if begin else None
        walk = Walk(plan, shape, state)
        if is_noted:
            walk.start()
            walk._walker.join(240)
            assert walk.total == len(steps)
        for number in asked:
            if begin <= number < len(steps):
                assert walk.is_near(number)
                assert contents(walk.step(number)) == contents(steps[number])
            else:
                with pytest.raises(InputError, match=f"there is no step {number} in this plan"):
                    walk.step(number)
    finally:
        walk_module._NOTED, walk_module._KEPT_STEPS, walk_module._MAX_NOTES = before


def test_an_endless_plan_is_walked_for_a_while_and_its_steps_are_found(mixed_shards, monkeypatch):
    monkeypatch.setattr(walk_module, "_WALK_SECONDS", 0.2)
    options = StreamOptions(pack_size=700, epochs=None, window=16)
    plan = open_plan(normalise_sources(mixed_shards), options)
    walk = Walk(plan, options.shape(1), None)
    walk.start()
    walk._walker.join(240)
    assert walk.total is None
    wanted = next(islice(plan.after(0).planner.steps(options.shape(1)), 90, None))
    assert contents(walk.step(90)) == contents(wanted)
