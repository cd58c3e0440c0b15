"""Who gets what: every unit once, ranks equal in number and in cost, for both kinds of barrier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.errors import ConfigError
from vlm_stream.plan import BalanceConfig, CostConfig, PackConfig, PlanConfig, StepShape, plan_report
from vlm_stream.plan.balance import assign, equal_parts, relative_costs, swap_until_even
from vlm_stream.plan.queue import UnitTable


def table_of(llm, vit, tokens=None, decode=None):
    llm, vit = np.asarray(llm, dtype=np.int64), np.asarray(vit, dtype=np.int64)
    n = len(llm)
    return UnitTable(
        windows=(),
        window=np.zeros(n, dtype=np.int64),
        unit=np.arange(n),
        tokens=llm if tokens is None else np.asarray(tokens),
        llm=llm,
        vit=vit,
        decode=np.zeros(n, dtype=np.int64) if decode is None else decode,
        labels=np.full(n, -1),
        hashes=np.random.default_rng(0).integers(0, 2**63, n).astype(np.uint64),
        num_samples=np.ones(n, dtype=np.int64),
        dropped=(),
    )


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 2**32))
def test_parts_hold_every_item_once_in_equal_numbers(num_parts, size, seed):
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 10**6, (2, num_parts * size))
    parts = equal_parts(first + second, num_parts)
    assert parts.shape == (num_parts, size)
    costs = np.stack([relative_costs(first, num_parts), relative_costs(second, num_parts)])
    swapped = swap_until_even(parts, costs, 50)
    for result in (parts, swapped):
        assert sorted(result.ravel().tolist()) == list(range(num_parts * size))

    def peak(result):
        loads = [relative_costs(c, num_parts)[result].sum(axis=1).max() for c in (first, second)]
        return max(loads)

    assert peak(swapped) <= peak(parts)


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.builds(StepShape, world_size=st.integers(1, 5), micro_batches=st.integers(1, 3), batch_size=st.integers(1, 3)),
    st.sampled_from(["step", "micro", "none"]),
    st.sampled_from(["free", "sorted", "stream"]),
)
def test_every_unit_is_assigned_once(count, shape, barrier, policy):
    rng = np.random.default_rng(count)
    table = table_of(rng.integers(1, 1000, count), rng.integers(0, 1000, count))
    grid = assign(table, shape, BalanceConfig(barrier=barrier), policy)
    num_steps = -(-count // shape.units_per_step)
    assert grid.shape == (num_steps, shape.micro_batches, shape.world_size, shape.batch_size)
    assert sorted(grid[grid >= 0].tolist()) == list(range(count))


def imbalance(load):
    return float(load.max() / load.mean())


def packs_like(rng, n):
    return rng.normal(1e6, 5e4, n).astype(np.int64), np.clip(rng.normal(4e5, 1.5e5, n), 0, None).astype(np.int64)


def test_a_barrier_once_a_step_evens_both_costs():
    table = table_of(*packs_like(np.random.default_rng(1), 256))
    shape = StepShape(world_size=64, micro_batches=4)
    even = assign(table, shape, BalanceConfig(barrier="step"), "free")[0]
    plain = assign(table, shape, BalanceConfig(barrier="none"), "free")[0]
    for cost, before in ((table.llm, 1.04), (table.vit, 1.2)):
        assert imbalance(cost[even].sum(axis=(0, 2))) < 1.01
        assert imbalance(cost[plain].sum(axis=(0, 2))) > before


def test_a_barrier_every_micro_step_evens_the_total():
    table = table_of(*packs_like(np.random.default_rng(1), 512))

    def lost(barrier):
        grid = assign(table, StepShape(world_size=64, micro_batches=8), BalanceConfig(barrier=barrier), "free")[0]
        total = (table.llm + table.vit)[grid].sum(axis=2)  # [micro, rank]
        return total.max(axis=1).sum() / total.mean(axis=1).sum() - 1

    assert lost("micro") < lost("none") / 4


def test_a_horizon_helps_where_ranks_have_one_micro_batch():
    table = table_of(*packs_like(np.random.default_rng(1), 512))
    shape = StepShape(world_size=64)

    def mean_imbalance(grid):
        return np.mean([imbalance((table.llm + table.vit)[step].sum(axis=(0, 2))) for step in grid])

    far = mean_imbalance(assign(table, shape, BalanceConfig(horizon=8), "free"))
    near = mean_imbalance(assign(table, shape, BalanceConfig(barrier="none"), "free"))
    assert far < 1.05 < 1.2 < near


def test_rows_that_share_a_batch_are_neighbours_in_length():
    tokens = np.random.default_rng(1).permutation(64) + 1
    table = table_of(tokens, np.zeros(64), tokens)
    grid = assign(table, StepShape(world_size=4, micro_batches=4, batch_size=4), BalanceConfig(), "sorted")
    spread = np.ptp(tokens[grid], axis=3)
    assert (spread == 3).all()
    kept = assign(table, StepShape(world_size=4, micro_batches=4, batch_size=4), BalanceConfig(), "stream")
    assert (np.diff(kept, axis=3) == 1).all()


def test_last_step_is_filled_on_every_rank(make):
    plan = make.planner([make.source("s", [50] * 3)], PlanConfig(mode=PackConfig(pack_size=8192)))
    shape = StepShape(world_size=5, micro_batches=2)
    steps = list(plan.steps(shape))
    num_units = len(make.stream(plan))
    assert len(steps) == -(-num_units // 10)
    fillers = sum(units.count(None) for _, _, units in make.rows(steps[-1]))
    assert fillers == len(steps) * 10 - num_units


def test_balance_never_changes_the_stream(make):
    sources = [make.source("s", [50] * 8)]
    streams = [
        make.stream(make.planner(sources, PlanConfig(mode=PackConfig(pack_size=8192), balance=balance)))
        for balance in (BalanceConfig(), BalanceConfig(barrier="micro", costs=CostConfig(vit_linear=5.0)))
    ]
    assert streams[0] == streams[1]


def test_ranks_are_even_through_the_planner(make):
    plan = make.planner([make.source("s", [256] * 16)], PlanConfig(mode=PackConfig(pack_size=8192)))
    report = plan_report(plan, StepShape(world_size=8, micro_batches=4), max_steps=10)
    assert report.llm_imbalance_step < 1.02
    assert report.vit_imbalance_step < 1.02


def test_refusals():
    with pytest.raises(ConfigError, match="barrier='rank' means nothing"):
        BalanceConfig(barrier="rank")
    with pytest.raises(ConfigError, match="horizon=0 leaves nothing"):
        BalanceConfig(horizon=0)


@pytest.mark.parametrize("barrier", ["micro", "step"])
@pytest.mark.parametrize(
    ("shape", "horizon"),
    [
        (StepShape(world_size=8, micro_batches=8), 1),
        (StepShape(world_size=8, micro_batches=4, batch_size=2), 1),
        (StepShape(world_size=8), 8),
    ],
)
def test_decoding_is_even_in_every_barrier_mode_and_nothing_else_changes(barrier, shape, horizon):
    rng = np.random.default_rng(4)
    llm, vit = rng.integers(900, 1100, (2, 64))
    decode = rng.integers(1, 20, 64) * np.where(np.arange(64) % 4 == 0, 100, 1)
    balance = BalanceConfig(barrier=barrier, horizon=horizon)

    def loads(table, values):
        return values[assign(table, shape, balance, "free")].sum(axis=3)  # [steps, micro, rank]

    even, plain = table_of(llm, vit, decode=decode), table_of(llm, vit)
    assert imbalance(loads(even, decode).sum(axis=(0, 1))) < 1.4
    assert imbalance(loads(plain, decode).sum(axis=(0, 1))) > 1.6
    if barrier == "micro":  # ranks do the same at the same time, each something else
        at_once = (np.sort(loads(table, llm + vit).reshape(-1, shape.world_size), axis=1) for table in (even, plain))
        assert len({tuple(sorted(map(tuple, columns.tolist()))) for columns in at_once}) == 1


def test_long_clips_do_not_meet_on_one_rank():
    rng = np.random.default_rng(3)
    llm, vit = rng.integers(900, 1100, (2, 64))
    decode = np.where(np.arange(64) % 8 == 0, 1000, 0)
    shape = StepShape(world_size=8, micro_batches=8)

    def uneven(table):
        numbers = assign(table, shape, BalanceConfig(), "free")  # [steps, micro, rank, row]
        loads = decode[numbers].sum(axis=(0, 1, 3))
        return loads.max() / loads.mean()

    assert uneven(table_of(llm, vit, decode=decode)) == 1
    assert uneven(table_of(llm, vit)) > 1


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(2, 5), st.integers(1, 3), st.integers(0, 2**32))
def test_decoding_takes_no_evenness_from_the_model(world, micro, horizon, seed):
    rng = np.random.default_rng(seed)
    count = world * micro * horizon
    llm, vit = rng.integers(1, 10**6, (2, count))
    decode = np.where(rng.random(count) < 0.3, rng.lognormal(8, 1.5, count), 0).astype(np.int64)
    shape = StepShape(world_size=world, micro_batches=micro)

    def peaks(table):
        parts = assign(table, shape, BalanceConfig(horizon=horizon), "free")
        return [relative_costs(cost, world * horizon)[parts].sum(axis=(1, 3)).max() for cost in (llm, vit)]

    for with_decoding, without in zip(peaks(table_of(llm, vit, decode=decode)), peaks(table_of(llm, vit)), strict=True):
        assert with_decoding <= max(without, 1.005 * (1 << 20))
