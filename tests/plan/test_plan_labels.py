"""The labels of a step: those of all its samples, over ranks and micro-batches, or nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vlm_stream.plan import (
    BalanceConfig,
    GroupConfig,
    MixtureConfig,
    PackConfig,
    PlainConfig,
    PlanConfig,
    Planner,
    StepShape,
)

MODES = {
    "packed": PackConfig(pack_size=4096),
    "grouped": GroupConfig(),
    "budget": GroupConfig(token_budget=9000),
    "plain": PlainConfig(),
}


def lengths(rng, n):
    return (rng.bit_generator.random_raw(n) % np.uint64(3000)).astype(np.int64) + 1


def plan_of(make, mode, labels=None, **config):
    sources = [make.source("a", [40, 40, 9]), make.source("b", [25])]

    class Reader(make.reader):
        def of_shard(self, source, shard):
            columns = super().of_shard(source, shard)
            return columns if labels is None else replace(columns, labels=labels(columns, source, shard))

    config = PlanConfig(window=64, mode=mode, mixture=MixtureConfig(stop="each"), **config)
    return Planner(sources, Reader(sources, lengths), config)


def by_hand(plan, step, refs=None):
    """Add the labels of a step's samples up, sample by sample."""
    shape = step.shape
    rows = [step.refs(rank, micro) for rank in range(shape.world_size) for micro in range(shape.micro_batches)]
    found = [ref for each in rows for row in each for ref in row]
    return sum(int(plan.read_columns.of_shard(ref.source, ref.shard).labels[ref.row]) for ref in found)


@pytest.mark.parametrize("shape", [StepShape(), StepShape(world_size=3, micro_batches=2, batch_size=2)])
@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("horizon", [1, 2])
def test_a_step_knows_the_labels_of_all_its_samples(make, mode, shape, horizon):
    plan = plan_of(make, MODES[mode], balance=BalanceConfig(horizon=horizon))
    steps = list(plan.steps(shape))
    assert [step.total_labels for step in steps] == [by_hand(plan, step) for step in steps]
    for step in steps:
        parts = [step.labels(rank, micro) for rank in range(shape.world_size) for micro in range(shape.micro_batches)]
        assert sum(parts) == step.total_labels
    every = sum(int(plan.read_columns.of_shard(s, n).labels.sum()) for s, n in ((0, 0), (0, 1), (0, 2), (1, 0)))
    assert sum(step.total_labels for step in steps) == every


def test_one_unknown_sample_makes_its_step_unknown_and_no_other(make):
    def labels(columns, source, shard):
        counts = columns.labels.copy()
        if (source, shard) == (0, 1):
            counts[7] = -1
        return counts

    shape = StepShape(world_size=2, micro_batches=2)
    plan, known = plan_of(make, MODES["packed"], labels), plan_of(make, MODES["packed"])
    steps, others = list(plan.steps(shape)), list(known.steps(shape))
    unknown = [step for step in steps if step.total_labels is None]
    assert len(unknown) == 1
    parts = [unknown[0].labels(rank, micro) for rank in range(2) for micro in range(2)]
    assert parts.count(None) == 1
    for step, other in zip(steps, others, strict=True):
        assert step.total_labels in (None, other.total_labels)
        assert step.state_after()["delivered"] == other.state_after()["delivered"]


def test_samples_without_labels_are_known_to_have_none(make):
    plan = plan_of(make, MODES["plain"], lambda columns, *_: columns.labels * 0)
    assert {step.total_labels for step in plan.steps(StepShape(world_size=2))} == {0}


@pytest.mark.parametrize("mode", [PackConfig(pack_size=1000, long_samples="truncate"), PlainConfig(max_tokens=1000)])
def test_a_cut_sample_makes_its_step_unknown(make, mode):
    plan = plan_of(make, replace(mode, long_samples="truncate"))
    seen = set()
    for step in plan.steps(StepShape(world_size=2)):
        refs = [ref for rank in range(2) for row in step.refs(rank, 0) for ref in row]
        is_cut = any(plan.read_columns.of_shard(ref.source, ref.shard).tokens[ref.row] > 1000 for ref in refs)
        assert (step.total_labels is None) == is_cut
        seen.add(is_cut)
    assert seen == {True, False}


def test_dropped_samples_are_not_counted(make):
    plan = plan_of(make, PlainConfig(max_tokens=1000, long_samples="drop"))
    steps = list(plan.steps(StepShape(world_size=2)))
    assert any(step.dropped for step in steps)
    assert [step.total_labels for step in steps] == [by_hand(plan, step) for step in steps]


@pytest.mark.parametrize("mode", ["packed", "plain"])
def test_an_interrupted_step_goes_on_with_its_count(make, mode):
    """Micro-batches that were delivered before belong to the step, also those of carried samples."""
    shape = StepShape(world_size=2, micro_batches=3)
    plan = plan_of(make, MODES[mode])
    steps = list(plan.steps(shape))
    for number in (0, 2, len(steps) - 2):
        again = next(iter(plan.steps(shape, steps[number].state_after(1))))
        assert again.micro_begin == 2
        assert again.total_labels == steps[number].total_labels
        behind = list(plan.steps(shape, steps[number].state_after()))
        assert [step.total_labels for step in behind] == [step.total_labels for step in steps[number + 1 :]]


def test_what_is_assigned_again_for_another_shape_counts_what_it_holds(make):
    shape, other = StepShape(world_size=2, micro_batches=3), StepShape(world_size=3, micro_batches=1)
    plan = plan_of(make, MODES["packed"])
    steps = list(plan.steps(shape))
    rest = list(plan.steps(other, steps[1].state_after(0)))
    assert [step.total_labels for step in rest] == [by_hand(plan, step) for step in rest]
    done = steps[0].total_labels + sum(steps[1].labels(rank, 0) for rank in range(2))
    assert done + sum(step.total_labels for step in rest) == sum(step.total_labels for step in steps)


def test_carried_and_resumed_cut_samples_stay_unknown(make):
    """A state names carried samples; their counts are read again, and cut again."""
    mode = PackConfig(pack_size=1000, long_samples="truncate")
    plan = plan_of(make, mode)
    shape = StepShape(world_size=2)
    steps = list(plan.steps(shape))
    expected = [step.total_labels for step in steps]
    for number in range(0, len(steps), 5):
        behind = [step.total_labels for step in plan.steps(shape, steps[number].state_after())]
        assert behind == expected[number + 1 :]
