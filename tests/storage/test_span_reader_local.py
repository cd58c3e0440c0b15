from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.shard_data import read
from vlm_stream.errors import BadSampleError, ChangedObjectError, StorageError
from vlm_stream.storage import Member, ReadOptions, SpanReader, open_store
from vlm_stream.storage.local import LocalStore


def test_samples_come_in_plan_order_with_their_bytes(local_shards):
    pairs = local_shards.order()
    with SpanReader() as reader:
        results = read(reader, pairs)
    assert [tag for tag, _ in results] == [tag for tag, _ in pairs]
    for tag, result in results:
        local_shards.assert_equal(tag, result)
    totals = reader.metrics
    assert totals.samples == len(pairs)
    assert totals.bytes_wanted == sum(span.size for _, span in pairs)


def test_a_sequential_epoch_needs_few_requests_and_no_wasted_byte(local_shards):
    with SpanReader() as reader:
        for tag, result in read(reader, enumerate(local_shards.spans)):
            local_shards.assert_equal(tag, result)
    assert reader.metrics.requests == 3  # one for each shard
    assert reader.metrics.bytes_read == reader.metrics.bytes_wanted


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_any_limits_same_bytes(local_shards, data):
    positions = data.draw(st.lists(st.integers(0, len(local_shards.spans) - 1), max_size=80))
    options = ReadOptions(
        max_request_bytes=data.draw(st.integers(500, 40_000)),
        max_gap_bytes=data.draw(st.integers(0, 10_000)),
    )
    with SpanReader(options) as reader:
        results = read(reader, [(p, local_shards.spans[p]) for p in positions])
    assert [tag for tag, _ in results] == positions
    for tag, result in results:
        local_shards.assert_equal(tag, result)


def test_several_readings_are_under_way_at_a_time_and_each_keeps_its_order(local_shards):
    batches = [[5, 3, 3], [], list(range(40)), [59]]
    with SpanReader() as reader:
        readings = [reader.begin([local_shards.spans[position] for position in batch]) for batch in batches]
        for reading, batch in reversed(list(zip(readings, batches, strict=True))):
            results = reading.results()
            assert len(results) == len(batch)
            for position, result in zip(batch, results, strict=True):
                local_shards.assert_equal(position, result)
    assert reader.metrics.samples == 44


def test_results_are_taken_once(local_shards):
    with SpanReader() as reader:
        reading = reader.begin(local_shards.spans[:2])
        assert len(reading.results()) == 2
        with pytest.raises(StorageError, match="they were taken already"):
            reading.results()


def test_requests_are_merged_within_a_reading_alone(local_shards):
    first, second = local_shards.spans[:2]
    with SpanReader() as reader:
        reader.begin([first, second]).results()
        assert reader.metrics.requests == 1
        for reading in [reader.begin([first]), reader.begin([second])]:
            reading.results()
    assert reader.metrics.requests == 3


def test_a_cancelled_reading_says_so_and_others_go_on(local_shards, monkeypatch):
    go_on = threading.Event()
    fetch = LocalStore.fetch

    def slow_fetch(*args):
        assert go_on.wait(240)
        return fetch(*args)

    monkeypatch.setattr(LocalStore, "fetch", slow_fetch)
    with SpanReader(ReadOptions(max_request_bytes=1000)) as reader:
        cancelled, other = reader.begin(local_shards.spans), reader.begin(local_shards.spans[:3])
        cancelled.cancel()
        go_on.set()
        with pytest.raises(StorageError, match=r"The reading was cancelled.*begin again"):
            cancelled.results()
        for tag, result in enumerate(other.results()):
            local_shards.assert_equal(tag, result)
    assert reader.metrics.samples == 3


def test_flipped_byte_becomes_a_bad_sample_and_nothing_else_is_lost(local_shards):
    span = local_shards.spans[7]
    file = Path(local_shards.root, span.path)
    blob = bytearray(file.read_bytes())
    blob[span.offset + 100] ^= 1
    file.write_bytes(blob)
    with SpanReader() as reader:
        results = dict(read(reader, enumerate(local_shards.spans)))
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
        read(reader, enumerate(local_shards.spans))


def test_shard_cut_short_gives_bad_samples_when_its_size_was_not_recorded(local_shards):
    spans = [span._replace(shard_size=None) for span in local_shards.spans[:20]]
    file = Path(local_shards.root, spans[0].path)
    file.write_bytes(file.read_bytes()[: spans[18].offset + 10])
    with SpanReader() as reader:
        results = [result for _, result in read(reader, enumerate(spans))]
    assert [getattr(result, "reason", "") for result in results] == [""] * 18 + ["truncated"] * 2
    assert "only 10 of" in str(results[18])


def test_member_outside_of_its_span_is_a_bad_sample(local_shards):
    span = local_shards.spans[0]
    wrong = span._replace(members=(Member("json", span.offset, span.size + 1),))
    with SpanReader() as reader:
        ((_, result),) = read(reader, [(0, wrong)])
    assert result.reason == "member_outside_span"


def test_samples_of_a_missing_shard_are_bad_and_name_its_path(local_shards):
    open_store(local_shards.root).delete(local_shards.spans[0].path)
    with SpanReader() as reader:
        results = [result for _, result in read(reader, enumerate(local_shards.spans))]
    assert [getattr(result, "reason", "") for result in results] == ["missing_shard"] * 20 + [""] * 40
    assert re.search(r"There is no file .*part/shard-000000.tar", str(results[0]))


@pytest.mark.parametrize("max_gap_bytes", [0, 256 * 1024])
def test_single_members_are_read_without_what_lies_between_them(local_shards, max_gap_bytes):
    narrow = []
    for span in local_shards.spans:
        (first, _) = span.members
        text = Member("json", first.offset, 200)  # a small text before a large medium
        narrow.append(span._replace(offset=text.offset, size=200, crc32c=None, members=(text,)))
    with SpanReader(ReadOptions(max_gap_bytes=max_gap_bytes)) as reader:
        for tag, result in read(reader, enumerate(narrow)):
            assert bytes(result["json"]) == local_shards.contents[tag]["json"][:200]
    assert reader.metrics.bytes_read == reader.metrics.bytes_wanted == 200 * len(narrow)


def test_a_span_without_a_checksum_is_not_checked(local_shards):
    wrong, unknown = (local_shards.spans[0]._replace(crc32c=crc) for crc in (0, None))
    with SpanReader() as reader:
        (_, refused), (_, passed) = read(reader, [(0, wrong), (0, unknown)])
    assert isinstance(refused, BadSampleError)
    local_shards.assert_equal(0, passed)


def test_an_empty_member_is_an_empty_text(local_shards):
    span = local_shards.spans[3]
    empty = Member("txt", span.offset + 5, 0)
    with SpanReader() as reader:
        ((_, result),) = read(reader, [(0, span._replace(offset=empty.offset, size=0, crc32c=None, members=(empty,)))])
    assert bytes(result["txt"]) == b""
