from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.storage import ReadOptions, Span, plan_requests


def span(offset: int, size: int, path: str = "a.tar", shard_size: int | None = None) -> Span:
    return Span("s3://bucket/root", path, offset, size, 0, (), shard_size)


def shapes(spans, **options):
    return [(r.path, r.offset, r.size, r.spans) for r in plan_requests(spans, ReadOptions(**options))]


def test_neighbours_share_a_request_and_the_first_needed_comes_first():
    spans = [span(5000, 100), span(0, 100), span(5200, 100), span(0, 50, "b.tar"), span(110, 100)]
    assert shapes(spans, max_gap_bytes=100) == [
        ("a.tar", 5000, 300, (0, 2)),
        ("a.tar", 0, 210, (1, 4)),
        ("b.tar", 0, 50, (3,)),
    ]


def test_small_samples_far_apart_are_not_worth_their_gaps():
    spans = [span(0, 100), span(1000, 100), span(1100, 100), span(1250, 100)]
    assert shapes(spans) == [("a.tar", 0, 100, (0,)), ("a.tar", 1000, 350, (1, 2, 3))]
    assert shapes(spans, max_amplification=6) == [("a.tar", 0, 1350, (0, 1, 2, 3))]


def test_a_run_is_cut_between_samples_and_a_large_sample_into_parts():
    spans = [span(0, 60), span(60, 60), span(120, 250)]
    assert shapes(spans, max_request_bytes=100) == [
        ("a.tar", 0, 60, (0,)),
        ("a.tar", 60, 60, (1,)),
        ("a.tar", 120, 83, (2,)),
        ("a.tar", 203, 83, (2,)),
        ("a.tar", 286, 84, (2,)),
    ]


def test_most_of_a_shard_means_all_of_it():
    spans = [span(0, 450, shard_size=1000), span(550, 450, shard_size=1000)]
    assert shapes(spans, max_gap_bytes=10) == [("a.tar", 0, 1000, (0, 1))]
    assert len(shapes(spans, max_gap_bytes=10, whole_shard_fraction=0.95)) == 2


def test_nothing_wanted_costs_no_request_of_its_own_where_all_of_a_shard_is():
    spans = [span(2, 0, shard_size=20), span(12, 0, shard_size=20), span(12, 8, shard_size=20)]
    assert shapes(spans, whole_shard_fraction=0.3) == [("a.tar", 2, 18, (0, 1, 2))]


def test_a_sample_that_is_wanted_twice_is_read_once():
    assert shapes([span(0, 100), span(0, 100)]) == [("a.tar", 0, 100, (0, 1))]


spans_of_shards = st.lists(
    st.builds(span, st.integers(0, 5000), st.integers(1, 400), st.sampled_from(["a.tar", "b.tar"]), st.just(6000)),
    max_size=40,
)


@given(spans_of_shards, st.integers(0, 500), st.integers(50, 2000))
def test_every_span_is_covered_exactly_by_what_names_it(spans, max_gap, max_request):
    requests = plan_requests(spans, ReadOptions(max_gap_bytes=max_gap, max_request_bytes=max_request))
    for position, each in enumerate(spans):
        parts = [r for r in requests if position in r.spans]
        assert all(r.path == each.path for r in parts)
        if len(parts) == 1:
            (part,) = parts
            assert part.offset <= each.offset
            assert each.offset + each.size <= part.offset + part.size
        else:
            assert parts[0].offset == each.offset
            assert sum(part.size for part in parts) == each.size
            assert all(a.offset + a.size == b.offset for a, b in itertools.pairwise(parts))
    assert all(0 < r.size <= max_request for r in requests)
    first_needs = [min(r.spans) for r in requests]
    assert first_needs == sorted(first_needs)


@given(spans_of_shards, st.integers(0, 500))
def test_no_gap_larger_than_allowed_is_read(spans, max_gap):
    options = ReadOptions(max_gap_bytes=max_gap, whole_shard_fraction=1.0)
    for request in plan_requests(spans, options):
        if sum({s.offset: s.size for s in spans if s.path == request.path}.values()) >= 6000:
            continue  # the whole shard was wanted
        covered = {byte for p in request.spans for byte in range(spans[p].offset, spans[p].offset + spans[p].size)}
        assert request.size <= options.max_amplification * len(covered)
        end = request.offset
        for each in sorted((spans[p] for p in request.spans), key=lambda s: s.offset):
            assert each.offset - end <= max_gap
            end = max(end, each.offset + each.size)


@given(spans_of_shards)
def test_of_local_files_not_a_byte_is_read_that_nobody_wants(spans):
    local = [span._replace(root="/data/set") for span in spans]
    for request in plan_requests(local, ReadOptions(whole_shard_fraction=0.01)):
        covered = {byte for p in request.spans for byte in range(spans[p].offset, spans[p].offset + spans[p].size)}
        assert request.size == len(covered)


def test_neighbours_in_local_files_are_read_together():
    spans = [span(number << 20, 1 << 20)._replace(root="/data/set") for number in range(17)]
    assert [r.spans for r in plan_requests(spans, ReadOptions())] == [tuple(range(16)), (16,)]
