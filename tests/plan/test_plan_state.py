"""States: small, plain JSON, refused with a reason when they do not fit, and kept where a change makes sense."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.plan import (
    BalanceConfig,
    CostConfig,
    GroupConfig,
    MixtureConfig,
    OrderConfig,
    PackConfig,
    PlainConfig,
    PlanConfig,
    Planner,
    Ref,
    StepShape,
)
from vlm_stream.plan.order import Samples
from vlm_stream.plan.state import pack_carry, unpack_carry
from vlm_stream.plan.window import WindowStart

SHAPE = StepShape(world_size=3, micro_batches=2)
CONFIG = PlanConfig(
    seed=5,
    window=200,
    mode=PackConfig(pack_size=8192),
    order=OrderConfig(group_shards=4),
    mixture=MixtureConfig(weigh_by="size", stop="each"),
    geometry="tower 14 merge 2",
)


def sources_of(make, **b):
    return [make.source("a", [50] * 10), make.source("b", [20] * 10, **b)]


def state_in_the_middle(make, config=CONFIG, *, step=7, micro=0, sources=None, shape=SHAPE):
    plan = make.planner(sources or sources_of(make), config)
    for found in plan.steps(shape):
        if found.index == step:
            return json.loads(json.dumps(found.state_after(micro)))
    raise AssertionError("the run is shorter than the test believes")


def delivered_until(make, plan, step, micro, shape=SHAPE):
    refs = Counter()
    for found in plan.steps(shape):
        last = micro if found.index == step else shape.micro_batches
        refs.update(r for m, _, units in make.rows(found) if m <= last for u in units if u for r in u.refs)
        if found.index == step:
            return refs
    raise AssertionError("the run is shorter than the test believes")


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 10**6) | st.integers(1, 9), st.integers(1, 4)), max_size=50),
        min_size=1,
        max_size=3,
    )
)
def test_carried_samples_survive_the_text(sources):
    carry = []
    for number, drawn in enumerate(sources):
        distances = np.cumsum([gap for gap, _ in drawn]).tolist()
        ages = sorted(age for _, age in drawn)
        carry += [(number, distance, age) for distance, age in zip(distances, ages, strict=True)]
    table = np.asarray(carry, dtype=np.int64).reshape(-1, 3)
    positions = tuple(10**9 + number for number in range(len(sources)))
    zeros = np.zeros(len(carry), dtype=np.int64)
    samples = Samples(
        refs=np.stack([table[:, 0], zeros, zeros], axis=1),
        position=np.asarray(positions)[table[:, 0]] - table[:, 1],
        tokens=zeros,
        vision=zeros,
        vit=zeros,
        decode=zeros,
        labels=zeros,
        age=table[:, 2],
    ).pick(np.random.default_rng(0).permutation(len(carry)))
    start = WindowStart(number=9, draw=0, positions=positions, carry=samples)
    assert unpack_carry(*json.loads(json.dumps(pack_carry(start)))).tolist() == table.tolist()


@pytest.mark.parametrize(("counts", "text"), [([[3]], ""), ([[1]], "00"), ([[0]], "0RjU"), ([[1 << 20]], "0RjU")])
def test_carried_samples_of_another_number_are_refused(counts, text):
    with pytest.raises(ValueError, match="do not have the size that they name"):
        unpack_carry(counts, text)


def test_a_state_holds_no_world_size_between_steps(make):
    plan = make.planner(sources_of(make), CONFIG)
    state = next(plan.steps(SHAPE)).state_after()
    assert "begun" not in state
    assert "world_size" not in json.dumps(state)


def test_a_state_does_not_depend_on_when_it_is_asked_for(make):
    plan = make.planner(sources_of(make), CONFIG)
    early = [step.state_after(m) for step in plan.steps(SHAPE) for m in range(2)]
    late = [step.state_after(m) for step in list(plan.steps(SHAPE)) for m in range(2)]
    assert early == late


def test_the_digest_proves_what_was_delivered(make):
    def digests(config, shape=SHAPE):
        plan = make.planner(sources_of(make), config)
        return [step.state_after()["delivered"][3] for step in plan.steps(shape)]

    assert len(set(digests(CONFIG))) == len(digests(CONFIG))
    assert digests(CONFIG)[0] != digests(replace(CONFIG, seed=6))[0]
    assert digests(CONFIG)[3] != digests(CONFIG, StepShape(world_size=2, micro_batches=3))[3]
    last = list(make.planner(sources_of(make), CONFIG).steps(SHAPE))[-1].state_after()
    assert last["delivered"][2] == len(make.refs(make.planner(sources_of(make), CONFIG).steps(SHAPE)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "another order: seed was 5 and is 6"),
        ({"window": 300}, "another plan: window was 200 and is 300"),
        ({"mode": PackConfig(pack_size=4096)}, r"another plan: mode.pack_size was 8192 and is 4096"),
        ({"mode": PlainConfig()}, "mode was 'pack' and is 'plain'"),
        ({"order": OrderConfig(group_shards=5)}, r"order.group_shards was 4 and is 5"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"geometry": "tower 16"}, r"another processor geometry \('tower 14 merge 2', now 'tower 16'\)"),
    ],
)
def test_another_plan_is_refused_by_name(make, change, message):
    state = state_in_the_middle(make)
    plan = make.planner(sources_of(make), replace(CONFIG, **change))
    with pytest.raises(StateError, match=message):
        plan.steps(SHAPE, state)


def test_other_sources_are_refused_by_name(make):
    state = state_in_the_middle(make)
    a, b = sources_of(make)
    for sources, message in [
        ([a], "source 'b' is gone"),
        ([a, b, make.source("c", [9])], "source 'c' is new"),
        ([a, replace_digest(b)], "source 'b' has other shards, indexes or another sample_ratio"),
        (sources_of(make, sample_ratio=0.5), "source 'b' has other shards"),
    ]:
        with pytest.raises(StateError, match=message):
            make.planner(sources, CONFIG).steps(SHAPE, state)


def replace_digest(spec):
    return type(spec)(name=spec.name, samples_per_shard=spec.samples_per_shard, digest="changed", weight=spec.weight)


def test_other_lengths_under_the_same_digest_are_noticed(make):
    state = state_in_the_middle(make)
    plan = make.planner(sources_of(make), CONFIG, lambda rng, n: rng.integers(1, 5000, n))
    with pytest.raises(StateError, match=r"Window \d+ of the plan does not come out as it was"):
        plan.steps(SHAPE, state)


def test_damaged_states_are_refused(make):
    plan = make.planner(sources_of(make), CONFIG)
    good = state_in_the_middle(make)
    for spoil in ({"version": 2}, {"version": None}):
        with pytest.raises(StateError, match="The state has version"):
            plan.steps(SHAPE, {**good, **spoil})
    with pytest.raises(StateError, match="The state has version None"):
        plan.steps(SHAPE, [])
    for key in ("sources", "carry", "delivered", "done", "terms"):
        broken = copy.deepcopy(good)
        del broken[key]
        with pytest.raises(StateError, match=f"The state is damaged .KeyError: '{key}'"):
            plan.steps(SHAPE, broken)
    with pytest.raises(StateError, match="The state is damaged"):
        plan.steps(SHAPE, {**good, "carry": "AAAA"})
    with pytest.raises(StateError, match="do not have the size that they name"):
        plan.steps(SHAPE, {**good, "carry": [[[1 << 20], []], good["carry"][1]]})


def test_a_state_inside_a_step_behind_the_end_is_refused(make):
    state = state_in_the_middle(make)
    for source in state["sources"]:
        source[3] = source[2]
    state.update(carry=[[[], []], ""], done=0, digest=None)
    with pytest.raises(StateError, match="stands inside a step, but the stream has no units left there"):
        next(make.planner(sources_of(make), CONFIG).steps(SHAPE, state))


def test_unknown_overrides_are_refused(make):
    plan = make.planner(sources_of(make), CONFIG, allow=["geometri"])
    with pytest.raises(ConfigError, match="allow='geometri' is no override: did you mean 'geometry'"):
        plan.steps(SHAPE, state_in_the_middle(make))


@pytest.mark.parametrize(
    ("allow", "change"),
    [
        ("geometry", {"geometry": "other"}),
        ("plan", {"mode": PackConfig(pack_size=4096, long_samples="truncate")}),
        ("plan", {"mode": GroupConfig()}),
        ("plan", {"window": 77}),
    ],
)
def test_an_allowed_change_plans_the_open_window_again_and_misses_nothing(make, allow, change):
    config = replace(CONFIG, mode=PackConfig(pack_size=8192, long_samples="truncate"))
    state = state_in_the_middle(make, config, step=9)
    before = delivered_until(make, make.planner(sources_of(make), config), 9, 0)
    plan = make.planner(sources_of(make), replace(config, **change), allow=[allow])
    rest = Counter(make.refs(plan.steps(SHAPE, state)))
    everything = {Ref(s, shard, row) for s, size in ((0, 50), (1, 20)) for shard in range(10) for row in range(size)}
    assert set(before) | set(rest) == everything
    assert set(rest.values()) == {1}
    assert len(set(before) & set(rest)) <= 200 + 100  # a window, and what it was given


def test_changed_weights_begin_behind_what_was_planned(make):
    """Also in the middle of a window and of a step: exactly once for what both mixtures have to deliver."""
    state = state_in_the_middle(make, step=7, micro=0)
    before = delivered_until(make, make.planner(sources_of(make), CONFIG), 7, 0)
    plan = make.planner(sources_of(make, weight=3.0), CONFIG)
    for shape in (SHAPE, StepShape(world_size=4)):
        steps = list(plan.steps(shape, state))
        assert Counter(make.refs(steps)) + before == Counter(
            Ref(s, shard, row) for s, size in ((0, 50), (1, 20)) for shard in range(10) for row in range(size)
        )
    early = [ref.source for ref in make.refs(steps)][:200]
    plain = [ref.source for ref in make.refs(make.planner(sources_of(make), CONFIG).steps(shape, state))][:200]
    assert sum(early) > sum(plain)

    # A second change while the first one's window is still open.
    third = make.planner(sources_of(make, weight=0.2), CONFIG)
    stopped = next(plan.steps(StepShape(world_size=2, micro_batches=3), state))
    part = Counter(r for m, _, units in make.rows(stopped) if m < 1 for u in units if u for r in u.refs)
    rest = Counter(make.refs(third.steps(StepShape(world_size=5), stopped.state_after(0))))
    assert rest + part + before == Counter(make.refs(steps)) + before


def test_more_epochs_may_be_asked_for_while_the_last_window_is_open(make):
    plan = make.planner(sources_of(make), CONFIG)
    last = list(plan.steps(SHAPE))[-2]
    before = delivered_until(make, plan, last.index, 0)
    longer = make.planner(sources_of(make), replace(CONFIG, epochs=2))
    rest = Counter(make.refs(longer.steps(SHAPE, last.state_after(0))))
    assert set((rest + before).values()) == {2}


def test_an_added_source_leaves_the_others_where_they_were(make):
    a, b = sources_of(make)
    state = state_in_the_middle(make)
    before = delivered_until(make, make.planner([a, b], CONFIG), 7, 0)
    names = {0: "a", 1: "b"}
    plan = make.planner([make.source("new", [30] * 4), b, a], CONFIG, allow=["sources"])
    rest = Counter((plan.sources[ref.source].name, ref.shard, ref.row) for ref in make.refs(plan.steps(SHAPE, state)))
    whole = rest + Counter((names[ref.source], ref.shard, ref.row) for ref in before.elements())
    assert set(whole.values()) == {1}
    assert Counter(name for name, _, _ in whole) == {"a": 500, "b": 200, "new": 120}


def test_a_removed_source_is_gone_and_the_others_miss_nothing(make):
    a, b = sources_of(make)
    state = state_in_the_middle(make)
    before = delivered_until(make, make.planner([a, b], CONFIG), 7, 0)
    plan = make.planner([b], CONFIG, allow=["sources"])
    rest = {(ref.shard, ref.row) for ref in make.refs(plan.steps(SHAPE, state))}
    assert rest | {(r.shard, r.row) for r in before if r.source == 1} == {(s, r) for s in range(10) for r in range(20)}


def test_another_balance_inside_a_step_delivers_the_rest_once(make):
    state = state_in_the_middle(make, step=7, micro=0)
    before = delivered_until(make, make.planner(sources_of(make), CONFIG), 7, 0)
    balance = BalanceConfig(barrier="micro", costs=CostConfig(llm_square=0.01, vit_linear=9.0))
    plan = make.planner(sources_of(make), replace(CONFIG, balance=balance))
    whole = Counter(make.refs(plan.steps(SHAPE, state))) + before
    assert set(whole.values()) == {1}
    assert whole.total() == 700


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32))
def test_a_resume_walks_no_farther_than_its_window(make, seed):
    """Opening a state far into an epoch reads the shards of its window, not those before."""
    spec = make.source("long", [100] * 400)
    config = PlanConfig(seed=seed, window=500, mode=PackConfig(pack_size=8192), order=OrderConfig(group_shards=8))
    step = next(s for s in make.planner([spec], config).steps(StepShape(world_size=8)) if s.index == 90)
    reader = make.reader([spec])
    next(Planner([spec], reader, config).steps(StepShape(world_size=8), step.state_after()))
    assert len(set(reader.asked)) <= 6 * 8  # the window's groups, and those of the samples it was given


def test_a_state_stays_small_at_the_worst_moment(make):
    """Three sources, full carry, holes left by a step of another shape, and a step that is open again."""
    rng = np.random.default_rng(0)
    lengths = lambda _, n: rng.integers(4200, 8000, n)  # noqa: E731  no two fit together: every pack is carried
    sources = [make.source(f"a-rather-long-name-of-a-dataset-{k}", [1000] * 300) for k in range(3)]
    reader = CachedReader(make, lengths, 1000)
    mode = PackConfig(pack_size=8192)
    config = PlanConfig(window=4096, mode=mode, epochs=None, geometry="g" * 64)
    plan = Planner(sources, reader, config)
    state = None
    for shape, skip in (
        (StepShape(world_size=512, micro_batches=8), 1),
        (StepShape(world_size=300, micro_batches=4), 0),
    ):
        step = next(itertools.islice(plan.steps(shape, state), skip, None))
        state = step.state_after(shape.micro_batches // 2)
    assert state["carry"][1]
    assert "done_beyond" in state
    assert "begun" in state
    assert len(json.dumps(state)) <= 4 * 1024


def test_a_state_of_half_a_billion_samples_fits_into_a_kilobyte(make):
    sources = [make.source("finevision", [5000] * 100_000)]
    reader = CachedReader(make, lambda _, n: np.random.default_rng(1).lognormal(6.5, 0.9, n).clip(1, 8192), 5000)
    config = PlanConfig(mode=PackConfig(pack_size=8192), geometry="0123456789abcdef+0", text="d" * 64)
    steps = Planner(sources, reader, config).steps(StepShape(world_size=256, micro_batches=8))
    sizes = [len(json.dumps(step.state_after(), separators=(",", ":"))) for step in itertools.islice(steps, 12)]
    assert max(sizes) <= 1024


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"seed": 6}, False),
        ({"window": 201}, False),
        ({"geometry": "other"}, False),
        ({"text": "other"}, False),
        ({"epochs": 7}, True),
        ({"balance": BalanceConfig(barrier="micro")}, True),
    ],
)
def test_the_digest_names_what_a_state_must_find_again(make, change, is_same):
    digest = make.planner(sources_of(make), CONFIG).digest
    assert len(bytes.fromhex(digest)) == 8
    assert (make.planner(sources_of(make), replace(CONFIG, **change)).digest == digest) == is_same
    assert make.planner(sources_of(make, sample_ratio=0.5), CONFIG).digest != digest


class CachedReader:
    def __init__(self, make, lengths, size):
        self.columns = make.columns(lengths(None, size))
        self.join = make.join

    def __call__(self, source, shards):
        return self.join([self.columns] * len(shards))
