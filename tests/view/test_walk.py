"""Steps of a plan in any order are those of the plan, from the start or from a state, by noted cursors or without."""

import shutil
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.view.conftest import open_viewer
from tests.waiting import wait_for
from vlm_stream.errors import InputError, VlmStreamError
from vlm_stream.options import StreamOptions
from vlm_stream.planning import open_plan
from vlm_stream.recipe import normalise_sources
from vlm_stream.view import steps as steps_module
from vlm_stream.view.page_compare import compare
from vlm_stream.view.server import make_app
from vlm_stream.view.steps import Walk
from vlm_stream.view.viewer import Pace


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
    before = steps_module._NOTED, steps_module._KEPT_STEPS, steps_module._MAX_NOTES
    steps_module._NOTED, steps_module._KEPT_STEPS, steps_module._MAX_NOTES = 1, 2, 5
    try:
        options = StreamOptions(pack_size=700, **changes)
        plan = open_plan(normalise_sources(mixed_shards), options)
        shape = options.shape(world)
        steps = list(plan.after(0).planner.steps(shape))
        begin = min(begin, len(steps))
        state = steps[begin - 1].state_after() if begin else None
        walk = Walk(plan, shape, state, Pace())
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
        steps_module._NOTED, steps_module._KEPT_STEPS, steps_module._MAX_NOTES = before


def test_an_endless_plan_is_walked_for_a_while_and_its_steps_are_found(mixed_shards, monkeypatch):
    monkeypatch.setattr(steps_module, "_WALK_SECONDS", 0.2)
    options = StreamOptions(pack_size=700, epochs=None, window=16)
    plan = open_plan(normalise_sources(mixed_shards), options)
    walk = Walk(plan, options.shape(1), None, Pace())
    walk.start()
    walk._walker.join(240)
    assert walk.total is None
    wanted = next(islice(plan.after(0).planner.steps(options.shape(1)), 90, None))
    assert contents(walk.step(90)) == contents(wanted)


def test_a_step_is_found_after_an_index_could_not_be_read(mixed_shards, tmp_path):
    """In between nobody says that there is no such step."""
    own = Path(shutil.copytree(mixed_shards, tmp_path / "own"))
    options = StreamOptions(pack_size=700)
    plan = open_plan(normalise_sources(own), options)
    walk = Walk(plan, options.shape(1), None, Pace())
    hidden = [path.rename(path.with_suffix(".hidden")) for path in sorted(own.glob("*.parquet"))]
    assert hidden
    walk.start()
    for _ in range(2):
        with pytest.raises(VlmStreamError) as told:
            walk.step(1)
        assert not isinstance(told.value, InputError)
    wait_for(lambda: walk._walker is None)
    for path in hidden:
        path.rename(path.with_suffix(".parquet"))
    assert contents(walk.step(1))
    walk.start()
    walk._walker.join(240)
    assert walk.total is not None


def test_walks_end_with_their_viewer(mixed_shards, monkeypatch):
    monkeypatch.setattr(steps_module, "_WALK_SECONDS", 3600.0)
    viewer = open_viewer(mixed_shards, options=StreamOptions(pack_size=700, epochs=None, window=16))
    walk = viewer.book.run_walk()
    walk.start()
    walker = walk._walker
    viewer.close()
    walker.join(240)
    assert not walker.is_alive()


def test_a_plan_is_looked_through_once_for_many_comparisons(mixed_shards):
    viewer = open_viewer(mixed_shards)
    book = viewer.book
    assert TestClient(make_app(viewer)).get("/compare").status_code == 200
    wait_for(lambda: 50 in book.walk(book.base).compared)  # while the form is filled in
    assert compare(book, book.base, 50) is book.walk(book.base).compared[50]
    assert compare(book, book.base, 2).report.steps == 2
    viewer.close()
