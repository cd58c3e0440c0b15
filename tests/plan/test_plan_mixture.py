"""Mixtures: proportions, stop rules, and sources of the same name or none."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.errors import ConfigError
from vlm_stream.plan import MixtureConfig, PlainConfig, PlanConfig, Planner, SourceSpec, StepShape
from vlm_stream.plan.mixture import shares_of, source_of_draws

weights = st.lists(st.floats(0.001, 100), min_size=2, max_size=8)


@settings(deadline=None)
@given(weights, st.integers(0, 10**12))
def test_proportions_hold_over_any_ten_thousand_draws(weights, first):
    shares = [w / sum(weights) for w in weights]
    counts = np.bincount(source_of_draws(first, 10_000, shares), minlength=len(shares))
    assert np.abs(counts / 10_000 - shares).max() < 0.002


@settings(deadline=None)
@given(st.integers(2, 64), st.integers(0, 63))
def test_no_stride_sees_another_mixture(stride, offset):
    """Every rank that takes each n-th draw meets the same proportions: no beat between mixture and world size."""
    draws = source_of_draws(0, 2000 * stride, [0.5, 0.3, 0.2])[offset % stride :: stride]
    assert np.abs(np.bincount(draws, minlength=3) / len(draws) - [0.5, 0.3, 0.2]).max() < 0.05


@given(st.integers(0, 10**9), st.integers(1, 500), st.integers(0, 400))
def test_a_draw_depends_on_its_number_alone(first, count, skip):
    shares = (0.2, 0.0, 0.8)
    whole = source_of_draws(first, skip + count, shares)
    assert (whole[skip:] == source_of_draws(first + skip, count, shares)).all()
    assert 1 not in whole


def run(make, stop, *, epochs=1, weigh_by="samples", ratio=1.0, weights=(1.0, 1.0)):
    sources = [
        make.source("a", [30] * 4, weight=weights[0]),
        make.source("b", [10] * 4, weight=weights[1], sample_ratio=ratio),
    ]
    config = PlanConfig(
        window=32,
        epochs=epochs,
        mode=PlainConfig(),
        mixture=MixtureConfig(stop=stop, weigh_by=weigh_by),
    )
    return make.planner(sources, config)


def drawn(make, plan, **kwargs):
    refs = make.refs(plan.steps(StepShape(**kwargs)))
    return Counter(ref.source for ref in refs), Counter(refs)


def test_first_ends_with_the_shortest(make):
    by_source, by_ref = drawn(make, run(make, "first"))
    assert by_source[1] == 40
    assert abs(by_source[0] - 40) <= 2
    assert max(by_ref.values()) == 1


def test_all_goes_on_until_the_longest_is_done(make):
    by_source, by_ref = drawn(make, run(make, "all"))
    assert by_source[0] == 120
    assert abs(by_source[1] - 120) <= 2
    assert {by_ref[ref] for ref in by_ref if ref.source == 0} == {1}


@pytest.mark.parametrize("epochs", [1, 3])
def test_each_delivers_every_source_exactly(make, epochs):
    by_source, by_ref = drawn(make, run(make, "each", epochs=epochs), world_size=3)
    assert by_source == {0: 120 * epochs, 1: 40 * epochs}
    assert set(by_ref.values()) == {epochs}


def test_never_goes_on(make):
    plan = run(make, "never")
    steps = [step for step, _ in zip(plan.steps(StepShape()), range(1000), strict=False)]
    assert len(steps) == 1000
    assert steps[-1].epoch > 3


def test_weight_by_size_finishes_together(make):
    by_source, _ = drawn(make, run(make, "first", weigh_by="size"))
    assert by_source[0] >= 118
    assert by_source[1] >= 38


def test_weight_by_tokens_divides_by_length():
    def spec(name, tokens):
        return SourceSpec(name=name, samples_per_shard=(9,), digest="", tokens_per_sample=tokens)

    assert shares_of([spec("long", 300.0), spec("short", 100.0)], "tokens") == pytest.approx((0.25, 0.75))


def test_a_source_of_weight_zero_is_never_drawn(make):
    by_source, _ = drawn(make, run(make, "all", weights=(1.0, 0.0)))
    assert by_source == {0: 120}


def test_an_empty_source_of_weight_zero_does_no_harm(make):
    sources = [make.source("a", [30]), make.source("empty", [], weight=0.0)]
    plan = make.planner(sources, PlanConfig(mode=PlainConfig()))
    steps = list(plan.steps(StepShape()))
    assert len(steps) == 30
    assert make.refs(plan.steps(StepShape(), steps[9].state_after())) == make.refs(steps[10:])


def test_epochs_without_a_seam_fill_only_the_last_step(make):
    plan = run(make, "each", epochs=2)
    steps = list(plan.steps(StepShape(world_size=7)))
    assert len(steps) == 46  # ceil(320 / 7)
    fillers = [sum(units.count(None) for _, _, units in make.rows(step)) for step in steps]
    assert fillers == [0] * 45 + [46 * 7 - 320]


def test_refusals(make):
    with pytest.raises(ConfigError, match="stop='frist' means nothing: did you mean 'first'"):
        MixtureConfig(stop="frist")
    with pytest.raises(ConfigError, match="weigh_by='bytes' means nothing"):
        MixtureConfig(weigh_by="bytes")
    with pytest.raises(ConfigError, match="All weights of the mixture are 0"):
        run(make, "first", weights=(0.0, 0.0))
    with pytest.raises(ConfigError, match="'a' has the weight -1"):
        run(make, "first", weights=(-1.0, 1.0))
    with pytest.raises(ConfigError, match="Two sources are named 'x'"):
        make.planner([make.source("x", [3]), make.source("x", [4])], PlanConfig())
    with pytest.raises(ConfigError, match="The plan has no sources"):
        Planner([], lambda source, shards: None, PlanConfig())
    sentence = r"'b' delivers no sample: 40 samples at a sample_ratio of 0\.01\. Raise the ratio, or leave the "
    with pytest.raises(ConfigError, match=sentence):
        run(make, "first", ratio=0.01)
    with pytest.raises(ConfigError, match="'x' has sample_ratio=-1"):
        make.source("x", [3], sample_ratio=-1)
    with pytest.raises(ConfigError, match="window=0 leaves nothing"):
        PlanConfig(window=0)
    with pytest.raises(ConfigError, match="epochs=0 leaves nothing"):
        PlanConfig(epochs=0)
    with pytest.raises(ConfigError, match="micro_batches=0 leaves nothing"):
        StepShape(micro_batches=0)
