"""What batches cost is learned from those that were built; a few do, and nothing makes a cost negative."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.blueprint import Work
from vlm_stream.dispatch.costs import CostModel


def work_of(draw):
    return Work(
        samples=draw.randrange(1, 20),
        tokens=draw.randrange(100, 8000),
        num_bytes=draw.randrange(10**4, 10**7),
        image_pixels=draw.randrange(10**7),
        video_pixels=draw.choice([0, 0, 0, draw.randrange(10**9)]),
    )


def real_seconds(work):
    return 0.003 * work.samples + 0.03e-6 * work.image_pixels + 0.5e-9 * work.video_pixels


def test_costs_are_learned_from_a_few_batches():
    draw, model = random.Random(0), CostModel()
    for _ in range(64):
        work = work_of(draw)
        model.learn(work, {"fetch": 0.0, "encode": real_seconds(work), "collate": 0.0}, 12 * work.image_pixels)
    for _ in range(100):
        work = work_of(draw)
        assert model.seconds(work) == pytest.approx(real_seconds(work), rel=0.2, abs=0.02)
        assert model.num_bytes(work) == pytest.approx(max(12 * work.image_pixels, work.num_bytes), rel=0.2, abs=10**6)


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 10**5), st.integers(0, 10**9), st.floats(0, 1e4)), max_size=40
    )
)
def test_whatever_was_seen_costs_are_finite_and_not_negative(seen):
    model = CostModel()
    for samples, tokens, pixels, seconds in seen:
        model.learn(Work(samples, tokens, 0, pixels, 0), {"encode": seconds}, pixels)
    for work in (Work(0, 0, 0, 0, 0), Work(50, 10**5, 10**9, 10**9, 10**11)):
        assert 0 <= model.seconds(work) < float("inf")
        assert model.num_bytes(work) >= work.num_bytes
