"""Grouped streams: similar lengths side by side and on all ranks at once, and no curriculum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.errors import ConfigError
from vlm_stream.plan import (
    BalanceConfig,
    GroupConfig,
    Key,
    PlainConfig,
    PlanConfig,
    StepShape,
    permute_chunks,
    plan_report,
    units,
)
from vlm_stream.plan.units import budget_groups


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(50, 400))
def test_no_group_is_over_budget_and_none_could_take_one_more(lengths, budget):
    lengths = np.sort(np.asarray(lengths))[::-1]
    splits, num_full = budget_groups(lengths, budget)
    assert splits[0] == 0
    assert splits[-1] == len(lengths)
    for number, (begin, end) in enumerate(zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True)):
        longest = max(int(lengths[begin]), 1)
        assert (end - begin) * longest <= budget
        assert ((end - begin + 1) * longest > budget) == (number < num_full)


@given(st.integers(0, 300), st.integers(1, 40))
def test_chunks_stay_whole(num_units, chunk):
    order = permute_chunks(num_units, chunk, Key(seed=1, purpose="p"))
    assert sorted(order.tolist()) == list(range(num_units))
    breaks = np.flatnonzero(np.diff(order) != 1)
    assert len(breaks) <= max(-(-num_units // chunk) - 1, 0)


@pytest.mark.parametrize("barrier", ["step", "micro"])
def test_ranks_meet_similar_lengths_at_the_same_step(make, barrier, monkeypatch):
    monkeypatch.setattr(units, "CHUNK_UNITS", 64)
    sources = [make.source("s", [256] * 16)]
    shape = StepShape(world_size=8, micro_batches=2, batch_size=4)
    balance = BalanceConfig(barrier=barrier)
    grouped = make.planner(sources, PlanConfig(window=2048, mode=GroupConfig(), balance=balance))
    plain = make.planner(sources, PlanConfig(window=2048, mode=PlainConfig(), balance=balance))
    report, other = plan_report(grouped, shape), plan_report(plain, shape)
    assert report.padding < 0.06 < 0.4 < other.padding
    assert report.total_imbalance_micro < 1.1


def test_chunks_are_no_curriculum(make, monkeypatch):
    monkeypatch.setattr(units, "CHUNK_UNITS", 64)
    plan = make.planner([make.source("s", [256] * 16)], PlanConfig(mode=GroupConfig()))
    window = next(plan.windows())
    means = window.tokens.reshape(-1, 64).mean(axis=1)
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.4
    assert not (np.sort(means)[::-1] == means).all()


def test_without_shuffle_lengths_fall_through_the_window(make):
    plan = make.planner([make.source("s", [256] * 4)], PlanConfig(mode=GroupConfig(), shuffle=False))
    window = next(plan.windows())
    assert (np.diff(window.tokens) <= 0).all()


def test_groups_of_a_budget_stay_under_it(make, monkeypatch):
    monkeypatch.setattr(units, "CHUNK_UNITS", 8)
    mode = GroupConfig(token_budget=16_384)
    plan = make.planner([make.source("s", [256] * 16)], PlanConfig(window=512, mode=mode))
    reader = make.reader(plan.sources)
    padded, tokens = 0, 0
    for step in plan.steps(StepShape()):
        (refs,) = step.refs(0, 0)
        lengths = [int(reader.of_shard(0, ref.shard).tokens[ref.row]) for ref in refs]
        assert len(lengths) * max(lengths) <= 16_384
        padded += len(lengths) * max(lengths)
        tokens += sum(lengths)
    assert tokens / padded > 0.9


@pytest.mark.parametrize(
    "mode", [PlainConfig(max_tokens=500), GroupConfig(max_tokens=500), GroupConfig(token_budget=500)]
)
def test_long_samples_are_dropped_by_name(make, mode):
    plan = make.planner([make.source("s", [100] * 3)], PlanConfig(mode=mode))
    steps = list(plan.steps(StepShape(world_size=2)))
    dropped = [note for step in steps for note in step.dropped]
    assert dropped
    assert all(note.reason == "too_long" and note.tokens > 500 for note in dropped)
    assert len(dropped) + len(make.refs(steps)) == 300


def test_refusals():
    with pytest.raises(ConfigError, match="token_budget=0 leaves nothing to deliver"):
        GroupConfig(token_budget=0)
    with pytest.raises(ConfigError, match="max_tokens=0 leaves nothing"):
        PlainConfig(max_tokens=0)
