"""Reports: numbers that can be counted by hand on small plans, as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vlm_stream.plan import (
    GroupConfig,
    MixtureConfig,
    OrderConfig,
    PackConfig,
    PlainConfig,
    PlanConfig,
    SampleColumns,
    StepShape,
    plan_report,
)
from vlm_stream.plan import report as report_module

WANTED = {
    "fill",
    "packs",
    "packs_lower_bound",
    "steps",
    "padding",
    "llm_imbalance_step",
    "vit_imbalance_step",
    "llm_imbalance_micro",
    "vit_imbalance_micro",
    "dropped",
    "live_shards",
    "variance_inflation",
    "state_bytes",
    "requests_per_sample",
}


@pytest.mark.parametrize("last", [[], [900, 900, 900]])
def test_what_the_stream_ends_without_counts_as_dropped(make, last):
    """Windows behind the last unit hold nothing that fits: no step is left that tells it."""
    lengths = [50] * (4 if last else 0) + (last or [900] * 5)
    config = PlanConfig(mode=PackConfig(pack_size=512), window=4, shuffle=False)
    plan = make.planner([make.source("s", [len(lengths)])], config, lambda rng, n: np.array(lengths))
    report = plan_report(plan, StepShape())
    assert report.samples + sum(report.dropped.values()) == len(lengths)
    assert report.dropped == {"too_long": lengths.count(900)}


def test_the_json_has_every_promised_figure(make):
    plan = make.planner([make.source("s", [50] * 8)], PlanConfig(mode=PackConfig(pack_size=8192)))
    report = plan_report(plan, StepShape(world_size=2, micro_batches=2))
    as_json = json.loads(json.dumps(report.to_dict()))
    assert set(as_json) >= WANTED
    assert as_json["fill"] + as_json["padding"] == pytest.approx(1)
    assert as_json["packs_lower_bound"] <= as_json["packs"]


@pytest.mark.parametrize(
    "mode", [PackConfig(pack_size=8192), PlainConfig(max_tokens=4000), GroupConfig(token_budget=9000)]
)
def test_counts_agree_with_the_steps(make, mode):
    sources = [make.source("a", [50] * 8), make.source("b", [20] * 5)]
    config = PlanConfig(window=128, mode=mode, mixture=MixtureConfig(weigh_by="size", stop="each"))
    plan = make.planner(sources, config)
    shape = StepShape(world_size=3, micro_batches=2, batch_size=2)
    report = plan_report(plan, shape)
    steps = list(plan.steps(shape))
    refs = make.refs(steps)
    units = [unit for step in steps for _, _, row in make.rows(step) for unit in row]
    dropped = [note for step in steps for note in step.dropped]
    assert report.complete
    assert report.steps == len(steps)
    assert report.samples == len(refs) == sum(report.samples_by_source.values())
    assert report.packs == sum(unit is not None for unit in units)
    assert report.fillers == units.count(None)
    assert report.tokens == sum(unit.tokens for unit in units if unit) == sum(report.tokens_by_source.values())
    assert report.dropped == ({"too_long": len(dropped)} if dropped else {})
    assert report.samples + sum(report.dropped.values()) == 500
    assert report.samples_by_source["a"] == sum(ref.source == 0 for ref in refs)


def test_padding_of_rows_by_hand(make):
    lengths = lambda rng, n: np.asarray([10, 20, 30, 40])  # noqa: E731
    plan = make.planner([make.source("s", [4])], PlanConfig(mode=PlainConfig(), shuffle=False), lengths)
    report = plan_report(plan, StepShape(batch_size=2))
    assert report.padding == pytest.approx(1 - 100 / (2 * 20 + 2 * 40))


def test_variance_inflation_by_hand(make):
    one_shard = make.planner([make.source("s", [64])], PlanConfig(mode=PlainConfig()))
    assert plan_report(one_shard, StepShape(world_size=16)).variance_inflation == 16
    apart = make.planner([make.source("s", [1] * 64)], PlanConfig(mode=PlainConfig()))
    assert plan_report(apart, StepShape(world_size=16)).variance_inflation == 1
    assert plan_report(apart, StepShape(world_size=16)).live_shards == 64


def test_live_shards_follow_the_group(make):
    def quality(**order):
        config = PlanConfig(window=512, mode=PlainConfig(), order=OrderConfig(**order))
        plan = make.planner([make.source("s", [100] * 64)], config)
        return plan_report(plan, StepShape(world_size=8), max_steps=64)

    few, many = quality(group_shards=4), quality(group_shards=32)
    assert few.live_shards <= 8 < 24 < many.live_shards
    assert few.variance_inflation > many.variance_inflation
    runs = quality(group_shards=32, run_length=8)
    assert runs.repeat_rate > 0.8 > many.repeat_rate


def neighbours(samples):
    """Count requests of 100 bytes a sample where rows that follow each other are joined."""
    refs = [sample.ref for sample in samples]
    ends = {(ref.source, ref.shard, ref.row + 1) for ref in refs}
    return sum(tuple(ref) not in ends for ref in refs), 100 * len(refs)


def test_runs_save_requests_where_a_batch_holds_them(make):
    def requests(run_length):
        config = PlanConfig(window=512, mode=PlainConfig(), order=OrderConfig(run_length=run_length))
        plan = make.planner([make.source("s", [128] * 32)], config)
        return plan_report(plan, StepShape(batch_size=16), max_steps=64, count_requests=neighbours).requests_per_sample

    assert requests(8) < 0.3 < 0.9 < requests(1)


def test_requests_are_counted_batch_by_batch_of_each_rank(make):
    plan = make.planner([make.source("s", [60] * 4)], PlanConfig(mode=PackConfig(pack_size=8192)))
    shape = StepShape(world_size=2, micro_batches=2)
    heard = []

    def count(samples):
        heard.append([sample.ref for sample in samples])
        return 3, 50

    report = plan_report(plan, shape, count_requests=count)
    batches = [
        refs
        for step in plan.steps(shape)
        for micro in range(2)
        for rank in range(2)
        if (refs := [ref for row in step.refs(rank, micro) for ref in row])
    ]
    assert heard == batches
    assert report.requests_per_sample == pytest.approx(3 * len(batches) / report.samples)
    assert report.requests_per_step == pytest.approx(3 * len(batches) / report.steps)
    assert report.bytes_per_step == pytest.approx(50 * len(batches) / report.steps)
    assert report.bytes_per_sample == pytest.approx(50 * len(batches) / report.samples)
    assert plan_report(plan, shape).requests_per_sample is None


def test_the_requests_of_many_samples_stand_for_those_of_all(make, monkeypatch):
    monkeypatch.setattr(report_module, "_MAX_COUNTED", 50)
    plan = make.planner([make.source("s", [60] * 4)], PlanConfig(mode=PlainConfig()))
    heard = []

    def count(refs):
        heard.append(len(refs))
        return len(refs), 7 * len(refs)

    report = plan_report(plan, StepShape(world_size=2), count_requests=count)
    assert len(heard) == 50
    assert (report.requests_per_sample, report.requests_per_step, report.bytes_per_step) == (1, 2, 14)


def test_a_look_at_the_first_steps_projects_the_epoch(make):
    plan = make.planner([make.source("s", [256] * 20)], PlanConfig(window=512, mode=PackConfig(pack_size=8192)))
    shape = StepShape(world_size=4, micro_batches=2)
    part, whole = plan_report(plan, shape, max_steps=40), plan_report(plan, shape)
    assert not part.complete
    assert part.steps == 40
    assert part.steps_per_epoch == pytest.approx(whole.steps, rel=0.1)
    assert whole.steps_per_epoch == pytest.approx(whole.packs / shape.units_per_step)


def test_text_only_plans_have_no_vision_to_balance(make):
    class Text(make.reader):
        def of_shard(self, source, shard):
            n = self.sources[source].samples_per_shard[shard]
            zeros = np.zeros(n, dtype=np.int64)
            return SampleColumns(
                tokens=zeros + 9,
                vision_tokens=zeros,
                vision_patches=zeros,
                vision_squares=zeros * 1.0,
                labels=zeros,
            )

    plan = make.planner([make.source("s", [64])], PlanConfig(mode=PackConfig(pack_size=64)))
    plan = type(plan)(plan.sources, Text(plan.sources), plan.config)
    report = plan_report(plan, StepShape(world_size=2, micro_batches=2))
    assert report.vit_imbalance_step == 1
    assert report.llm_imbalance_step == pytest.approx(1, abs=0.2)
