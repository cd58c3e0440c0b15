"""When shards will be read, against what the plan then reads."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.conftest import planner, source
from vlm_stream.plan import MixtureConfig, OrderConfig, PlainConfig, PlanConfig, StepShape, shard_uses

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def plan_of(sizes, group_shards, epochs, **options):
    config = PlanConfig(
        mode=PlainConfig(), order=OrderConfig(group_shards=group_shards), seed=3, window=16, epochs=epochs, **options
    )
    return planner([source(f"s{number}", each) for number, each in enumerate(sizes)], config)


@given(SIZES, st.integers(1, 5), st.integers(1, 3), st.data())
def test_shards_are_read_within_their_uses_and_nowhere_else(sizes, group_shards, epochs, data):
    plan = plan_of([sizes], group_shards, epochs)
    stream, total = plan.streams[0], sum(sizes) * epochs
    now = data.draw(st.integers(0, total - 1))
    uses = shard_uses(plan, [now], 10**6)
    read = stream.take(np.arange(now, total)).refs[:, 1]
    for at, shard in enumerate(read.tolist()):
        assert ((uses.shards == shard) & (uses.begins <= at) & (at < uses.ends)).sum() == 1
    whole = (uses.begins >= 0) & (uses.ends <= total)
    for shard, begin, end in zip(uses.shards[whole], uses.begins[whole], uses.ends[whole], strict=True):
        assert shard in read[int(begin) : int(end)]
    assert (np.diff(uses.begins) >= 0).all()


def test_a_source_that_is_drawn_more_often_is_through_its_shards_sooner():
    plan = plan_of([[4] * 8, [4] * 8], 2, None, mixture=MixtureConfig(stop="never"))
    even = shard_uses(plan, [0, 0], 32)
    assert even.begins[even.sources == 0].tolist() == even.begins[even.sources == 1].tolist()
    assert len(even.shards) >= 32
    weighted = [source("s0", [4] * 8, weight=3.0), source("s1", [4] * 8, weight=1.0)]
    plan = planner(weighted, plan.config)
    uses = shard_uses(plan, [0, 0], 32)
    ratio = uses.begins[uses.sources == 1].max() / uses.begins[uses.sources == 0].max()
    assert ratio == pytest.approx(3.0)


@pytest.mark.parametrize("stop", ["all", "each", "first", "never"])
def test_what_a_run_reads_stands_before_what_only_a_further_epoch_would(stop):
    plan = plan_of([[4] * 3, [4] * 6], 1, 1, mixture=MixtureConfig(stop=stop))
    uses = shard_uses(plan, [0, 0], 10**6)
    soon = uses.begins < 1e12
    epochs = {"all": [2, 1], "each": [1, 1], "first": [1, 1], "never": [3, 3]}[stop]  # the first round, told
    left = {"first": 3}.get(stop, epochs[1] * 6)  # of the longer one, the run ends in the middle
    assert [(soon & (uses.sources == source)).sum() for source in (0, 1)] == [epochs[0] * 3, left]
    assert set(uses.shards[~soon & (uses.sources == 1)]) <= set(range(6))
    assert len(uses.shards) == 3 * (3 + 6)
    # Once the shorter one is through, the longer one has all draws, where it goes on at all.
    if stop == "each":
        later = shard_uses(plan, [12, 12], 10**6)
        assert later.begins[later.begins < 1e12].tolist() == [0.0, 4.0, 8.0]
        assert later.shares.tolist() == [0.0, 1.0]


@given(st.integers(0, 3), st.integers(1, 3))
def test_a_step_tells_how_far_the_sources_are_also_where_samples_are_left_out(seed, micro_batches):
    config = PlanConfig(mode=PlainConfig(max_tokens=400), seed=seed, window=32, epochs=2)
    plan = planner([source("a", [30] * 4), source("b", [50] * 2, weight=2.0)], config)  # most samples are longer
    steps = list(plan.steps(StepShape(world_size=2, micro_batches=micro_batches, batch_size=2)))
    for step in steps:
        window = step.table.windows[0]
        for at, begin, end in zip(step.positions, window.start.positions, window.after.positions, strict=True):
            assert begin <= at <= end
    sums = [sum(step.positions) for step in steps]
    assert all(first < second for first, second in itertools.pairwise(sums))
    delivered = sum(
        len(row)
        for step in steps
        for rank in range(2)
        for micro in range(micro_batches)
        for row in step.refs(rank, micro)
    )
    assert sums[-1] > 2 * delivered
