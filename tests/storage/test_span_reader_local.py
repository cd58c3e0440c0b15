from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlm_stream.errors import BadSampleError, ChangedObjectError, NotFoundError
from vlm_stream.storage import Member, ReadOptions, SpanReader, engine, open_store, read_ahead
from vlm_stream.storage.local import LocalStore
from vlm_stream.storage.read_ahead import _Flight, _Waiting


@pytest.fixture(params=["in memory", "many bytes in memory", "on disk"], autouse=True)
def residency(request, monkeypatch):
    """Read all ways: few bytes of the page cache at once, many when they are due, others by threads."""
    if request.param == "on disk":
        monkeypatch.setattr(LocalStore, "is_resident", lambda *_: False)
        monkeypatch.setattr(LocalStore, "fetch_resident", lambda *_: None)
    if request.param == "many bytes in memory":
        monkeypatch.setattr(engine, "_FEW_BYTES", 0)
    return request.param


def test_samples_come_in_plan_order_with_their_bytes(local_shards):
    pairs = local_shards.order()
    with SpanReader(ReadOptions(prefetch_bytes=20_000)) as reader:
        results = list(reader.read(pairs))
    assert [tag for tag, _ in results] == [tag for tag, _ in pairs]
    for tag, result in results:
        local_shards.assert_equal(tag, result)
    totals = reader.metrics
    assert totals.samples == len(pairs)
    assert totals.bytes_wanted == sum(span.size for _, span in pairs)


def test_a_sequential_epoch_needs_few_requests_and_no_wasted_byte(local_shards):
    with SpanReader() as reader:
        for tag, result in reader.read(enumerate(local_shards.spans)):
            local_shards.assert_equal(tag, result)
    assert reader.metrics.requests == 4  # one for each shard, one more where the small first portion ends
    assert reader.metrics.read_amplification == 1.0


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_any_limits_same_bytes(local_shards, data):
    positions = data.draw(st.lists(st.integers(0, len(local_shards.spans) - 1), max_size=80))
    options = ReadOptions(
        prefetch_bytes=data.draw(st.integers(1, 60_000)),
        max_request_bytes=data.draw(st.integers(500, 40_000)),
        max_gap_bytes=data.draw(st.integers(0, 10_000)),
    )
    with SpanReader(options) as reader:
        results = list(reader.read((p, local_shards.spans[p]) for p in positions))
    assert [tag for tag, _ in results] == positions
    for tag, result in results:
        local_shards.assert_equal(tag, result)


def test_the_first_samples_do_not_wait_for_all_that_is_read_ahead(local_shards, residency):
    num_pulled = 0

    def pairs():
        nonlocal num_pulled
        for number in range(2000):
            num_pulled += 1
            yield number, local_shards.spans[number % len(local_shards.spans)]

    ahead = []
    with SpanReader(ReadOptions(prefetch_samples=300)) as reader:
        for number, (tag, result) in enumerate(reader.read(pairs())):
            assert tag == number
            local_shards.assert_equal(tag % len(local_shards.spans), result)
            ahead.append(num_pulled - number)
    assert ahead[0] == 16
    assert max(ahead[:8]) <= 16
    assert max(ahead[:16]) <= 64
    assert max(ahead) <= 300
    if residency == "on disk":  # there is always something under way; what lies in memory is asked for when it is due
        assert max(ahead) == 300
        assert min(ahead[:1700]) >= 8


def test_of_what_lies_in_memory_one_group_is_read_at_a_time(local_shards, residency, monkeypatch):
    spans, num_pulled = local_shards.spans, 0

    def groups():
        nonlocal num_pulled
        for begin in range(0, 40, 4):
            num_pulled += 1
            yield begin, spans[begin : begin + 4]

    monkeypatch.setattr(read_ahead, "_ENOUGH_BYTES", sum(span.size for span in spans[:4]) // 2)
    ahead = []
    with SpanReader() as reader:
        for number, (begin, results) in enumerate(reader.read_groups(groups())):
            ahead.append(num_pulled - number)
            for position, result in enumerate(results, begin):
                local_shards.assert_equal(position, result)
    assert max(ahead) > 4 if residency == "on disk" else max(ahead) == 1


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_groups_come_whole_and_in_order_whatever_their_size(local_shards, data):
    """Also empty ones, larger ones than what is read ahead, and the same sample again."""
    spans = local_shards.spans
    groups = data.draw(st.lists(st.lists(st.integers(0, len(spans) - 1), max_size=12), max_size=12))
    options = ReadOptions(prefetch_bytes=data.draw(st.sampled_from([1, 20_000, 10**6])), prefetch_samples=5)
    with SpanReader(options) as reader:
        found = list(reader.read_groups((number, [spans[p] for p in group]) for number, group in enumerate(groups)))
        totals = reader.metrics
    assert [tag for tag, _ in found] == list(range(len(groups)))
    assert [len(results) for _, results in found] == list(map(len, groups))
    for (_, results), group in zip(found, groups, strict=True):
        for position, result in zip(group, results, strict=True):
            local_shards.assert_equal(position, result)
    assert totals.samples == sum(map(len, groups))
    assert totals.bytes_wanted == sum(spans[p].size for group in groups for p in group)


@pytest.mark.parametrize("leaves_early", [True, False])
def test_what_was_read_is_let_go_of_without_the_collector(local_shards, leaves_early):
    """A circle between samples and requests would keep their memory from being used again."""
    gc.collect()
    gc.disable()
    try:
        with SpanReader(ReadOptions(prefetch_samples=16)) as reader:
            stream = reader.read_groups((None, local_shards.spans[begin : begin + 4]) for begin in range(0, 40, 4))
            next(stream)
            assert any(type(one) is _Waiting for one in gc.get_objects())
            if leaves_early:
                stream.close()
            assert len(list(stream)) == (0 if leaves_early else 9)
        del stream
        assert not [one for one in gc.get_objects() if type(one) in (_Waiting, _Flight)]
    finally:
        gc.enable()


def test_the_input_is_pulled_no_further_than_the_budget(local_shards):
    pulled = []

    def pairs():
        for tag, span in enumerate(local_shards.spans):
            pulled.append(span.size)
            yield tag, span

    with SpanReader(ReadOptions(prefetch_bytes=20_000, max_gap_bytes=0)) as reader:
        stream = reader.read(pairs())
        for num_taken, _ in enumerate(stream):
            assert sum(pulled[num_taken + 1 :]) <= 20_000 + max(pulled)


def test_flipped_byte_becomes_a_bad_sample_and_nothing_else_is_lost(local_shards):
    span = local_shards.spans[7]
    file = Path(local_shards.root, span.path)
    blob = bytearray(file.read_bytes())
    blob[span.offset + 100] ^= 1
    file.write_bytes(blob)
    with SpanReader() as reader:
        results = dict(reader.read(enumerate(local_shards.spans)))
    bad = results.pop(7)
    assert isinstance(bad, BadSampleError)
    assert (bad.stage, bad.reason) == ("read", "crc_mismatch")
    assert f"bytes {span.offset}..{span.offset + span.size} of {file}" in str(bad)
    for tag, result in results.items():
        local_shards.assert_equal(tag, result)
    assert reader.metrics.rereads == 1
    assert reader.metrics.bad_samples == 1


def test_shard_of_another_size_is_an_error(local_shards):
    file = Path(local_shards.root, local_shards.spans[0].path)
    file.write_bytes(file.read_bytes() + b"more")
    with (
        SpanReader() as reader,
        pytest.raises(ChangedObjectError, match="not the shard that its manifest describes"),
    ):
        list(reader.read(enumerate(local_shards.spans)))


def test_shard_cut_short_gives_bad_samples_when_its_size_was_not_recorded(local_shards):
    spans = [span._replace(shard_size=None) for span in local_shards.spans[:20]]
    file = Path(local_shards.root, spans[0].path)
    file.write_bytes(file.read_bytes()[: spans[18].offset + 10])
    with SpanReader() as reader:
        results = [result for _, result in reader.read(enumerate(spans))]
    assert [getattr(result, "reason", "") for result in results] == [""] * 18 + ["truncated"] * 2
    assert "only 10 of" in str(results[18])


def test_member_outside_of_its_span_is_a_bad_sample(local_shards):
    span = local_shards.spans[0]
    wrong = span._replace(members=(Member("json", span.offset, span.size + 1),))
    with SpanReader() as reader:
        ((_, result),) = reader.read([(0, wrong)])
    assert result.reason == "member_outside_span"


def test_missing_shard_names_its_path(local_shards):
    open_store(local_shards.root).delete(local_shards.spans[0].path)
    with SpanReader() as reader, pytest.raises(NotFoundError, match=r"There is no file .*part/shard-000000.tar"):
        list(reader.read(enumerate(local_shards.spans)))


@pytest.mark.parametrize("max_gap_bytes", [0, 256 * 1024])
def test_single_members_are_read_without_what_lies_between_them(local_shards, max_gap_bytes):
    narrow = []
    for span in local_shards.spans:
        (first, _) = span.members
        text = Member("json", first.offset, 200)  # a small text before a large medium
        narrow.append(span._replace(offset=text.offset, size=200, crc32c=None, members=(text,)))
    with SpanReader(ReadOptions(max_gap_bytes=max_gap_bytes)) as reader:
        for tag, result in reader.read(enumerate(narrow)):
            assert bytes(result["json"]) == local_shards.contents[tag]["json"][:200]
    assert reader.metrics.bytes_read == reader.metrics.bytes_wanted == 200 * len(narrow)


def test_a_span_without_a_checksum_is_not_checked(local_shards):
    wrong, unknown = (local_shards.spans[0]._replace(crc32c=crc) for crc in (0, None))
    with SpanReader() as reader:
        (_, refused), (_, passed) = reader.read([(0, wrong), (0, unknown)])
    assert isinstance(refused, BadSampleError)
    local_shards.assert_equal(0, passed)


def test_an_empty_member_is_an_empty_text(local_shards):
    span = local_shards.spans[3]
    empty = Member("txt", span.offset + 5, 0)
    with SpanReader() as reader:
        ((_, result),) = reader.read([(0, span._replace(offset=empty.offset, size=0, crc32c=None, members=(empty,)))])
    assert bytes(result["txt"]) == b""
