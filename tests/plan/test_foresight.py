"""When shards will be read, against what the plan then reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.conftest import planner, source
from vlm_stream.plan import MixtureConfig, OrderConfig, PlainConfig, PlanConfig, shard_uses

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
    whole = uses.begins >= 0
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
