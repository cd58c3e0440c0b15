"""A run that goes on with other ranks is shown as it goes on, and not as another run from the start."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from tests.view.conftest import open_viewer
from vlm_stream import StreamLoader
from vlm_stream.convert import make_shards
from vlm_stream.options import StreamOptions
from vlm_stream.plan import find_samples
from vlm_stream.recipe import normalise_sources
from vlm_stream.state import RunState
from vlm_stream.view import Viewer, Watched
from vlm_stream.view.html import url
from vlm_stream.view.server import make_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLAN: dict[str, Any] = {"mode": "plain", "batch_size": 1, "window": 16}
DONE, WORLD = 20, 4


@pytest.fixture(scope="module")
def state(mixed_shards: Path, processor: Any) -> dict[str, Any]:
    """Of a run that took some steps on one rank."""
    loader = StreamLoader(mixed_shards, processor=processor, num_workers=0, **PLAN)
    with loader:
        batches = iter(loader)
        for _ in range(DONE):
            next(batches)
        return loader.state_dict()


@pytest.fixture(scope="module")
def going_on(mixed_shards: Path, state: dict[str, Any]) -> Iterator[Viewer]:
    """The same run, which goes on with four ranks."""
    options = StreamOptions(**PLAN)
    run = Watched(state=RunState.from_dict(state).plan)
    viewer = open_viewer(mixed_shards, options=options, world=WORLD, run=run)
    yield viewer
    viewer.close()


def test_the_run_ends_where_it_will_end(going_on: Viewer) -> None:
    walk = going_on.book.run_walk()
    walk.start()
    walk._walker.join(240)
    view = going_on.run()
    assert view is not None
    planner = going_on.plan.after(0).planner
    steps = list(planner.steps(going_on.options.shape(WORLD), going_on.book.state))
    assert (view.step, view.total) == (DONE, DONE + len(steps))
    assert view.lately == f"in the next {min(len(steps), 24)} steps"  # nobody knows the ranks of those before
    assert sum(each.recent for each in view.mixture) == pytest.approx(1)


def test_a_key_leads_to_the_step_that_the_run_will_deliver_it_at(going_on: Viewer) -> None:
    book, client = going_on.book, TestClient(make_app(going_on))
    planner, shape = going_on.plan.after(0).planner, going_on.options.shape(WORLD)
    refs = {going_on.catalog.ref_at(place) for place in range(going_on.catalog.num_samples)}
    wanted = {sample.ref: sample for sample in find_samples(planner, shape, refs, state=book.state)}
    assert 0 < len(wanted) < len(refs)
    for ref in refs:
        (drawn,) = going_on.catalog.draw([ref])
        answer = client.get(url("/step", key=drawn.key))
        if ref in wanted:
            assert book.find(book.base, [ref]) == (wanted[ref],)
            assert f"<h1>Step {wanted[ref].step}" in answer.text
            assert f">{drawn.key}</td>" in answer.text
        else:
            assert answer.status_code == 400
            assert "came before the state of the run" in answer.text


def test_a_step_before_the_state_is_said_to_be_of_another_plan(going_on: Viewer) -> None:
    client = TestClient(make_app(going_on))
    said = f"Not of the run, whose state stands at step {DONE}"
    assert said in client.get(f"/step?step={DONE - 19}").text
    assert said not in client.get(f"/step?step={DONE}").text


def test_a_loader_that_goes_on_with_other_ranks_is_followed(
    mixed_shards: Path, processor: Any, state: dict[str, Any]
) -> None:
    more = {"rank": 0, "world_size": WORLD, "num_workers": 0, **PLAN}
    loader = StreamLoader(mixed_shards, processor=processor, **more)
    loader.load_state_dict(state)
    with loader, loader.serve_view() as running:
        viewer = running.viewer
        view = viewer.run()
        walk = viewer.book.run_walk()
        walk._walker.join(240)
        taken = 0
        for _ in loader:
            taken += 1
            view = viewer.run()
            if taken == 1:
                assert "ledger are those of this rank" in TestClient(make_app(viewer)).get("/run").text
            if taken < 3:
                assert (view.step, view.total) == (DONE + taken, walk.total)
                assert view.lately == f"in the last {taken} steps"
        assert walk.total == DONE + taken
        assert viewer.position() == DONE + taken  # the next round goes on there


def test_states_of_a_long_run_are_cursors_on_its_way(
    mixed_shards: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlm_stream.view import steps as steps_module

    monkeypatch.setattr(steps_module, "_FOLLOWED", 3)
    viewer = open_viewer(mixed_shards, options=StreamOptions(**PLAN))
    viewer.book.follow(None, 0)
    viewer.book.follow(RunState.from_dict(state).plan, 0)
    walk = viewer.book.run_walk()
    assert list(walk._notes) == [DONE]
    fresh = open_viewer(mixed_shards, options=StreamOptions(**PLAN)).book.run_walk()
    for number in (DONE + 1, DONE, 2):
        assert walk.step(number).refs(0, 0) == fresh.step(number).refs(0, 0)
    viewer.close()


@pytest.mark.parametrize("weigh_by", ["tokens", "samples"])
def test_the_mixture_is_shown_as_weights_count_it(
    toy_meta: Path, saved_processor: Path, processor: Any, tmp_path: Path, weigh_by: str
) -> None:
    """Clips are several times as long as captions: equal shares of tokens are unequal shares of samples."""
    for name in ("captions", "clips"):
        make_shards(toy_meta, tmp_path / name, names=(name,), processor=str(saved_processor), workers=1)
    sources = {
        "captions": {"url": str(tmp_path / "captions"), "weight": 3},
        "clips": {"url": str(tmp_path / "clips"), "weight": 3},
    }
    options = StreamOptions(pack_size=2048, weigh_by=weigh_by, stop="never", epochs=None, window=24)
    opened = Viewer(normalise_sources(sources), options, processor)
    step = next(islice(opened.plan.after(0).planner.steps(options.shape(1)), 30, None))
    viewer = Viewer(normalise_sources(sources), options, processor, run=Watched(state=step.state_after(None)))
    view, page = viewer.run(), TestClient(make_app(viewer)).get("/run").text
    opened.close()
    viewer.close()
    assert view is not None
    assert view.weighed == weigh_by
    assert f"Mixture, by {weigh_by}" in page
    assert [each.wanted for each in view.mixture] == [0.5, 0.5]
    assert [each.recent for each in view.mixture] == pytest.approx([0.5, 0.5], abs=0.1)
    assert (abs(view.mixture[0].drawn - 0.5) > 0.05) == (weigh_by == "tokens"), view.mixture
