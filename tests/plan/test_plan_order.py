"""The order of one source: a permutation in every epoch, open at any position, made of live groups only."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.errors import ConfigError, DatasetError
from vlm_stream.plan import OrderConfig, PlainConfig, PlanConfig, Planner, StepShape
from vlm_stream.plan.order import SourceStream
from vlm_stream.plan.randomness import Key, permutation, words


def stream_of(make, sizes, *, shuffle=True, seed=0, reader=None, ratio=1.0, **order):
    spec = make.source("s", sizes, sample_ratio=ratio)
    config = PlanConfig(seed=seed, shuffle=shuffle, order=OrderConfig(**order))
    return SourceStream(0, spec, reader or make.reader([spec]), config)


def span(position, count):
    return np.arange(position, position + count)


def refs(samples):
    return [tuple(ref) for ref in samples.refs[:, 1:].tolist()]


@given(st.integers(0, 2000), st.integers(0, 2**63))
def test_permutation_holds_every_number_once(count, seed):
    assert sorted(permutation(Key(seed=seed, purpose="p"), count).tolist()) == list(range(count))


def test_every_part_of_a_key_counts():
    base = {"seed": 1, "purpose": "p", "source": "s", "epoch": 2, "index": 3}
    other = {"seed": 2, "purpose": "q", "source": "t", "epoch": 3, "index": 4}
    seen = {words(Key(**base), 1).item()} | {words(Key(**{**base, name: other[name]}), 1).item() for name in base}
    assert len(seen) == 6


def test_permutations_are_uniform():
    counts = Counter(tuple(permutation(Key(seed=s, purpose="p"), 3).tolist()) for s in range(6000))
    assert len(counts) == 6
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 25  # chi-square, 5 degrees: p < 0.0002


sizes_of_shards = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0)


@settings(deadline=None)
@given(sizes_of_shards, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_every_epoch_holds_every_sample_once(make, sizes, group_shards, run_length, shuffle, epoch):
    stream = stream_of(make, sizes, shuffle=shuffle, group_shards=group_shards, run_length=run_length)
    total = sum(sizes)
    got = refs(stream.take(span(epoch * total, total)))
    assert sorted(got) == [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    if not shuffle:
        assert got == sorted(got)


@settings(deadline=None)
@given(sizes_of_shards, st.floats(0.2, 3.0), st.data())
def test_any_stretch_equals_that_part_of_the_walk(make, sizes, ratio, data):
    stream = stream_of(make, sizes, ratio=ratio, group_shards=3)
    length = stream.epoch_length
    if not length:
        return
    walk = refs(stream.take(span(0, 3 * length)))
    begin = data.draw(st.integers(0, 3 * length - 1))
    count = data.draw(st.integers(1, 3 * length - begin))
    samples = stream_of(make, sizes, ratio=ratio, group_shards=3).take(span(begin, count))
    assert refs(samples) == walk[begin : begin + count]
    reader = make.reader([stream.spec])
    for (shard, row), tokens in zip(refs(samples), samples.tokens.tolist(), strict=True):
        assert tokens == reader.of_shard(0, shard).tokens[row]


@settings(deadline=None)
@given(sizes_of_shards, st.floats(0.05, 3.5))
def test_sample_ratio_delivers_that_share(make, sizes, ratio):
    stream = stream_of(make, sizes, ratio=ratio, group_shards=3)
    assert stream.epoch_length == int(sum(sizes) * ratio + 1e-9)
    if not stream.epoch_length:
        return
    counts = Counter(refs(stream.take(span(0, stream.epoch_length))))
    assert counts.total() == stream.epoch_length
    # Shares are rounded shard by shard, so a shard may owe or be owed one whole round of a single sample.
    assert max(counts.values()) <= int(np.ceil(ratio)) + 1


def test_sample_ratio_above_one_repeats_evenly(make):
    counts = Counter(refs(stream_of(make, [100] * 4, ratio=2.5).take(span(0, 1000))))
    assert Counter(counts.values()) == {2: 200, 3: 200}


def test_small_ratio_reaches_other_samples_in_other_epochs(make):
    stream = stream_of(make, [1] * 50, ratio=0.5)
    epochs = [frozenset(refs(stream.take(span(25 * e, 25)))) for e in range(12)]
    assert all(len(epoch) == 25 for epoch in epochs)
    assert len(set(epochs)) == 12
    assert len(frozenset.union(*epochs)) == 50


def test_orders_differ_by_seed_and_epoch(make):
    stream = stream_of(make, [50] * 4, group_shards=2)
    first, second = refs(stream.take(span(0, 200))), refs(stream.take(span(200, 200)))
    assert first != second
    assert first != refs(stream_of(make, [50] * 4, group_shards=2, seed=1).take(span(0, 200)))


def test_a_group_mixes_all_its_shards_and_no_others(make):
    got = refs(stream_of(make, [100] * 40, group_shards=10).take(span(0, 4000)))
    for begin in range(0, 4000, 1000):
        assert len({shard for shard, _ in got[begin : begin + 1000]}) == 10
        assert len({shard for shard, _ in got[begin : begin + 100]}) >= 9


def test_runs_keep_neighbours_together(make):
    got = refs(stream_of(make, [96] * 8, group_shards=4, run_length=8).take(span(0, 768)))
    together = sum(a[0] == b[0] and a[1] + 1 == b[1] for a, b in pairwise(got))
    assert together >= 768 - 768 // 8
    for begin in range(0, 768, 8):
        run = got[begin : begin + 8]
        assert run == [(run[0][0], run[0][1] + k) for k in range(8)]


def test_only_touched_shards_are_read_and_each_once(make):
    spec = make.source("s", [1000] * 64)
    reader = make.reader([spec])
    stream = stream_of(make, [1000] * 64, shuffle=False, reader=reader, group_shards=16)
    stream.take(span(0, 1500))
    assert reader.asked == [(0, 0), (0, 1)]
    stream.take(span(1500, 1000))
    assert reader.asked == [(0, 0), (0, 1), (0, 2)]


def test_a_reader_is_asked_once_for_a_group(make):
    spec = make.source("s", [10] * 6)
    asked = []

    class Reader(make.reader):
        def __call__(self, source, shards):
            asked.append(len(shards))
            return super().__call__(source, shards)

    stream_of(make, [10] * 6, reader=Reader([spec]), group_shards=3).take(span(0, 60))
    assert asked == [3, 3]


def test_a_billion_samples_start_with_one_group(make):
    """Neither the start nor 99 % of the epoch touches more than the live group."""
    spec = make.source("huge", [10_000] * 100_000)
    columns = make.columns(np.full(10_000, 700))
    asked = []

    def read(source, shards):
        asked.extend(shards)
        return make.join([columns] * len(shards))

    stream = SourceStream(0, spec, read, PlanConfig(order=OrderConfig(group_shards=64)))
    for position in (0, 990_000_000):
        asked.clear()
        samples = stream.take(span(position, 4096))
        assert len(set(map(tuple, samples.refs.tolist()))) == 4096
        assert len(asked) == len(set(asked)) <= 64


def test_a_small_source_is_read_once_for_many_epochs(make):
    spec = make.source("s", [5, 5])
    reader = make.reader([spec])
    stream_of(make, [5, 5], reader=reader).take(span(0, 1000))
    assert len(reader.asked) == 2


def test_an_index_of_another_length_is_refused(make):
    spec = make.source("s", [10])
    plan = Planner([spec], lambda source, shards: make.columns(np.ones(9)), PlanConfig(mode=PlainConfig()))
    with pytest.raises(DatasetError, match="shard 0 of source 's' has 9 samples, the manifest says 10"):
        next(plan.steps(StepShape()))


@pytest.mark.parametrize("name", ["group_shards", "run_length"])
def test_orders_that_hold_nothing_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0 leaves nothing"):
        OrderConfig(**{name: 0})


class PickReader:
    """Tells how many samples were counted at each request."""

    def __init__(self, reader):
        self.reader, self.picked = reader, []

    def __call__(self, source, shards):
        columns = self.reader(source, shards)
        return Picked(columns, self.picked)


class Picked:
    def __init__(self, columns, picked):
        self.columns, self.picked = columns, picked

    def __len__(self):
        return len(self.columns)

    def pick(self, rows):
        self.picked.append(len(rows))
        return self.columns.pick(rows)


def test_a_first_window_counts_only_what_it_asks_for(make):
    spec = make.source("s", [1000] * 20)
    reader = PickReader(make.reader([spec]))
    stream = stream_of(make, [1000] * 20, reader=reader)
    stream.take(span(0, 100))
    assert sum(reader.picked) == 100
    stream.take(span(100, 3000))
    assert sum(reader.picked) == 20_000  # an eighth: now all are counted, and what they are counted from is let go
    assert not stream._groups[0, 0].columns._uncounted


@settings(deadline=None)
@given(sizes_of_shards, st.integers(1, 5), st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_columns_do_not_depend_on_when_they_are_counted(make, sizes, group_shards, cuts, shuffle):
    total = 3 * sum(sizes)
    whole = stream_of(make, sizes, group_shards=group_shards, shuffle=shuffle).take(span(0, total))
    stream = stream_of(make, sizes, group_shards=group_shards, shuffle=shuffle)
    ends = sorted({0, total, *(cut % total for cut in cuts)})
    parts = [stream.take(span(begin, end - begin)) for begin, end in pairwise(ends)]
    for name in ("refs", "tokens", "vision", "vit", "decode", "labels"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
