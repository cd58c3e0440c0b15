"""Packs: under capacity, as full as best-fit gets them, aligned, capped, carried; what does not fit is named."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.errors import ConfigError
from vlm_stream.plan import (
    PackConfig,
    PlainConfig,
    PlanConfig,
    Ref,
    StepShape,
    best_fit_decreasing,
    plan_report,
    units,
)
from vlm_stream.plan.units import packs_lower_bound


def best_fit_by_hand(lengths, capacity, vision=None, vision_size=0):
    """The definition: longest first, into the fullest open pack with room, the newest of equals."""
    packs, out = [], {}
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [
            k
            for k, members in enumerate(packs)
            if sum(lengths[j] for j in members) + lengths[i] <= capacity
            and (vision is None or sum(vision[j] for j in members) + vision[i] <= vision_size)
        ]
        if not fits:
            packs.append([i])
            out[i] = len(packs) - 1
            continue
        fullest = max(sum(lengths[j] for j in packs[k]) for k in fits)
        ties = [k for k in fits if sum(lengths[j] for j in packs[k]) == fullest]
        ties.sort(key=lambda k: max(order_put(packs[k], lengths)))
        packs[ties[-1]].append(i)
        out[i] = ties[-1]
    return [out[i] for i in range(len(lengths))], packs


def order_put(members, lengths):
    return [(-lengths[j], j) for j in members]


capacities = st.sampled_from([1, 7, 63, 64, 65, 100, 128, 1000, 8192])


@settings(deadline=None, max_examples=200)
@given(capacities, st.data())
def test_best_fit_is_what_its_definition_says(capacity, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=40))
    got = best_fit_decreasing(np.asarray(lengths), capacity).tolist()
    expected, _ = best_fit_by_hand(lengths, capacity)
    assert got == expected


@settings(deadline=None, max_examples=200)
@given(capacities, st.integers(1, 50), st.data())
def test_two_caps_hold_together(capacity, vision_size, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=40))
    vision = data.draw(st.lists(st.integers(0, vision_size), min_size=len(lengths), max_size=len(lengths)))
    got = best_fit_decreasing(np.asarray(lengths), capacity, np.asarray(vision), vision_size)
    assert np.bincount(got, weights=lengths).max() <= capacity
    assert np.bincount(got, weights=vision).max() <= vision_size
    _, packs = best_fit_by_hand(lengths, capacity, vision, vision_size)
    assert int(got.max()) + 1 == len(packs)


def first_fit(lengths, capacity):
    room = []
    for length in sorted(lengths, reverse=True):
        at = next((k for k, left in enumerate(room) if left >= length), None)
        if at is None:
            room.append(capacity - length)
        else:
            room[at] -= length
    return len(room)


@settings(deadline=None, max_examples=100)
@given(st.integers(10, 200), st.data())
def test_no_packing_beats_the_lower_bound(capacity, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=30))
    bound = packs_lower_bound(np.asarray(lengths), capacity)
    assert -(-sum(lengths) // capacity) <= bound <= int(best_fit_decreasing(np.asarray(lengths), capacity).max()) + 1
    assert bound <= first_fit(lengths, capacity)


def test_the_lower_bound_sees_what_the_sum_does_not():
    assert packs_lower_bound(np.full(10, 60), 100) == 10
    assert packs_lower_bound(np.asarray([60] * 4 + [40] * 6), 100) == 5
    assert packs_lower_bound(np.zeros(0, dtype=np.int64), 100) == 0


ADVERSARIAL = {
    "uniform 4000..7500": lambda rng, n: rng.integers(4000, 7501, n),
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.5, rng.integers(100, 300, n), rng.integers(5000, 6000, n)),
    "one giant": lambda rng, n: np.where(np.arange(n) == 0, 8192, rng.integers(1, 300, n)),
    "all zero": lambda rng, n: np.zeros(n, dtype=np.int64),
    "all equal": lambda rng, n: np.full(n, 1000),
    "mostly too long": lambda rng, n: rng.integers(7000, 30_000, n),
}


@pytest.mark.parametrize("name", sorted(ADVERSARIAL))
@pytest.mark.parametrize(
    "mode", [PackConfig(pack_size=8192), PackConfig(pack_size=8192, packing_ratio=0.9, alignment=16)]
)
def test_hard_lengths(make, name, mode):
    sources = [make.source("s", [128] * 12)]
    plan = make.planner(sources, PlanConfig(window=256, mode=mode), ADVERSARIAL[name])
    steps = list(plan.steps(StepShape(world_size=4)))
    reader = make.reader(sources, ADVERSARIAL[name])
    packs = [unit for step in steps for _, _, row in make.rows(step) for unit in row if unit]
    dropped = [note.ref for step in steps for note in step.dropped]
    assert Counter(make.refs(steps)) + Counter(dropped) == Counter(Ref(0, s, r) for s in range(12) for r in range(128))
    for unit in packs:
        lengths = [int(reader.of_shard(0, ref.shard).tokens[ref.row]) for ref in unit.refs]
        assert sum(lengths) == unit.tokens
        padded = sum(-(-max(length, 1) // mode.alignment) * mode.alignment for length in lengths)
        assert padded <= (mode.capacity if len(lengths) > 1 else mode.pack_size)
    assert all(int(reader.of_shard(0, ref.shard).tokens[ref.row]) > 8192 for ref in dropped)


@pytest.mark.parametrize("name", ["uniform 4000..7500", "bimodal", "one giant", "all equal"])
def test_windows_with_carry_need_no_more_packs_than_first_fit(make, name):
    sources = [make.source("s", [256] * 16)]
    plan = make.planner(sources, PlanConfig(window=512, mode=PackConfig(pack_size=8192)), ADVERSARIAL[name])
    report = plan_report(plan, StepShape(world_size=64))
    reader = make.reader(sources, ADVERSARIAL[name])
    stream = [
        ref for unit in make.stream(make.planner(sources, PlanConfig(window=512), ADVERSARIAL[name])) for ref in unit
    ]
    lengths = [int(reader.of_shard(0, ref.shard).tokens[ref.row]) for ref in stream]
    assert report.packs <= sum(first_fit(lengths[at : at + 512], 8192) for at in range(0, len(lengths), 512))


def test_carry_fills_what_would_stay_open_without_it(make, monkeypatch):
    sources = [make.source("s", [256] * 16)]

    def fill(carry):
        monkeypatch.setattr(units, "CARRY_SAMPLES", carry)
        mode = PackConfig(pack_size=8192)
        return plan_report(make.planner(sources, PlanConfig(window=256, mode=mode)), StepShape(world_size=64)).fill

    assert fill(0) < fill(128)
    assert fill(128) > 0.99


def test_no_sample_is_carried_for_longer_than_allowed(make, monkeypatch):
    monkeypatch.setattr(units, "CARRY_WINDOWS", 2)
    monkeypatch.setattr(units, "CARRY_SAMPLES", 16)

    def odd(rng, n):
        return np.full(n, 5000)  # nothing fits beside another: every pack is open, all of them want to be carried

    sources = [make.source("s", [64] * 8)]
    plan = make.planner(sources, PlanConfig(window=64, mode=PackConfig(pack_size=8192)), odd)
    oldest = 0
    for window in plan.windows():
        carry = window.after.carry
        oldest = max([oldest, *carry.age.tolist(), *window.samples.age.tolist()])
        assert len(carry) <= 16
    assert oldest == 2


def test_packs_are_not_sorted_by_fill_or_length(make):
    plan = make.planner([make.source("s", [512] * 8)], PlanConfig(window=4096, mode=PackConfig(pack_size=8192)))
    window = next(plan.windows())
    longest = window.samples.tokens[window.splits[:-1]]
    correlation = np.corrcoef(np.arange(len(longest)), longest)[0, 1]
    assert abs(correlation) < 0.2


def test_without_shuffle_packs_come_in_the_order_of_the_tars(make):
    config = PlanConfig(window=128, shuffle=False, mode=PackConfig(pack_size=8192))
    stream = make.stream(make.planner([make.source("s", [64] * 8)], config))
    first = [min((ref.shard, ref.row) for ref in unit) for unit in stream]
    late = sum(a > b for a, b in pairwise(first))
    assert late <= 4  # where one window ends and the next takes up what was carried
    assert first[0] == (0, 0)


LONG = [100, 9000, 50, 20_000, 300]


@pytest.mark.parametrize(
    ("rule", "delivered", "notes"),
    [
        ("drop", {0, 2, 4}, {"too_long": 2}),
        ("truncate", {0, 1, 2, 3, 4}, {"truncated": 2}),
    ],
)
def test_long_samples(make, rule, delivered, notes):
    mode = PackConfig(pack_size=8192, long_samples=rule)
    plan = make.planner([make.source("s", [5])], PlanConfig(mode=mode), lambda rng, n: np.asarray(LONG))
    steps = list(plan.steps(StepShape()))
    assert {ref.row for ref in make.refs(steps)} == delivered
    assert Counter(note.reason for step in steps for note in step.dropped) == notes
    assert all(unit.tokens <= 8192 for step in steps for _, _, row in make.rows(step) for unit in row if unit)


def test_long_samples_can_stop_the_run(make):
    mode = PackConfig(pack_size=8192, long_samples="raise")
    plan = make.planner([make.source("s", [5])], PlanConfig(mode=mode, shuffle=False), lambda rng, n: np.asarray(LONG))
    with pytest.raises(ConfigError, match=r"Sample 1 of shard 0 of source 's' has 9000 tokens .* above pack_size=8192"):
        next(plan.steps(StepShape()))


def test_the_limit_that_stops_the_run_is_named(make):
    sources = [make.source("s", [5])]
    for mode, limit in [
        (PackConfig(pack_size=99_999, vision_size=100, long_samples="raise"), "vision_size=100"),
        (PlainConfig(max_tokens=500, long_samples="raise"), "max_tokens=500"),
    ]:
        plan = make.planner(sources, PlanConfig(mode=mode), lambda rng, n: np.asarray(LONG))
        with pytest.raises(ConfigError, match=f"above {limit}; it fits no unit"):
            next(plan.steps(StepShape()))


def test_samples_with_too_much_vision_are_named(make):
    mode = PackConfig(pack_size=8192, vision_size=1000, long_samples="truncate")
    plan = make.planner(
        [make.source("s", [4])], PlanConfig(mode=mode), lambda rng, n: np.asarray([100, 3000, 1900, 600])
    )
    steps = list(plan.steps(StepShape()))
    assert Counter(note.reason for step in steps for note in step.dropped) == {"too_much_vision": 1}
    assert len(steps) == 2  # 950 and 350 vision tokens do not share a row of 1000; 50 may go with either


def test_a_stream_of_nothing_but_long_samples_does_not_hang(make):
    mode = PackConfig(pack_size=8)
    plan = make.planner(
        [make.source("s", [4])], PlanConfig(mode=mode, epochs=None, window=4), lambda rng, n: np.full(n, 99)
    )
    with pytest.raises(ConfigError, match="windows in a row hold no sample that fits"):
        next(plan.steps(StepShape()))
    finite = make.planner([make.source("s", [4])], PlanConfig(mode=mode), lambda rng, n: np.full(n, 99))
    assert list(finite.steps(StepShape())) == []


def test_refusals():
    with pytest.raises(ConfigError, match="pack_size=100 with alignment=16 gives rows that cannot be cut evenly"):
        PackConfig(pack_size=100, alignment=16)
    with pytest.raises(ConfigError, match=r"packing_ratio=1.5 is no share of a row"):
        PackConfig(pack_size=100, packing_ratio=1.5)
    with pytest.raises(ConfigError, match="long_samples='keep' means nothing"):
        PackConfig(pack_size=100, long_samples="keep")
    with pytest.raises(ConfigError, match="vision_size=0 leaves nothing to deliver"):
        PackConfig(pack_size=100, vision_size=0)


def test_what_the_stream_ends_without_is_told_in_one_line(make, caplog):
    sources, config = [make.source("s", [150] * 2)], PlanConfig(window=512, mode=PackConfig(pack_size=1))
    assert list(make.planner(sources, config).steps(StepShape(world_size=1))) == []
    (line,) = [record.getMessage() for record in caplog.records]
    said = r"300 samples are left out at the end of the stream \(300 too_long\): the longest is .*; raise pack_size"
    assert re.match(said, line)
