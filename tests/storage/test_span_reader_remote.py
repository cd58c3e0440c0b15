"""The reader against a real S3 server, with the faults of real networks between them."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import time

import pytest

from tests.servers import FaultMix
from tests.storage.shard_data import read, write_shards
from tests.waiting import wait_for
from vlm_stream.chaos import Fault
from vlm_stream.errors import AccessError, BadSampleError, ChangedObjectError, StorageError
from vlm_stream.storage import ReadOptions, RetryOptions, SpanReader, StoreOptions, open_store, plan_requests
from vlm_stream.storage.remote import ObjectStore


def alone(shards) -> ReadOptions:
    """Return options under which each sample is one request."""
    return ReadOptions(max_gap_bytes=0, max_request_bytes=max(span.size for span in shards.spans))


def proxied(proxy, **changes) -> StoreOptions:
    retry = RetryOptions(**{"backoff_s": 0.01, "max_backoff_s": 0.05, **changes.pop("retry", {})})
    return StoreOptions(endpoint=proxy.endpoint, region="us-east-1", allow_http=True, retry=retry, **changes)


def read_all(shards, options, store_options, seed=0):
    """Read every sample in a random order; check order and bytes; return the totals."""
    pairs = shards.order(seed)
    with SpanReader(options, store_options=store_options) as reader:
        results = read(reader, pairs)
        assert [tag for tag, _ in results] == [tag for tag, _ in pairs]
        for tag, result in results:
            shards.assert_equal(tag, result)
        return reader.metrics


def test_plan_order_and_bytes(s3_shards, s3_server):
    totals = read_all(s3_shards, ReadOptions(), s3_server.options)
    assert totals.requests <= totals.samples
    planned = plan_requests([span for _, span in s3_shards.order()], ReadOptions())
    assert (totals.requests, totals.bytes_read) == (len(planned), sum(request.size for request in planned))


@pytest.mark.parametrize("status", [500, 502, 429, 503])
def test_server_errors_are_tried_again(s3_shards, proxy, status):
    proxy.faults = lambda number, _method, _path: Fault("status", status=status) if number % 3 == 0 else None
    totals = read_all(s3_shards, alone(s3_shards), proxied(proxy))
    assert totals.requests == len(s3_shards.spans)
    assert proxy.seen["GET"] >= totals.requests + 20


def test_a_storm_of_503_is_waited_out(s3_shards, proxy):
    """Far more refusals than retries: a store that throttles is alive, so only the deadline counts."""
    proxy.faults = [Fault("status", status=503)] * 200
    options = dataclasses.replace(alone(s3_shards), max_inflight=4)
    totals = read_all(s3_shards, options, proxied(proxy, retry={"max_retries": 2}))
    assert totals.retries > 0
    assert proxy.seen["GET"] == 200 + len(s3_shards.spans)


def test_a_cut_body_goes_on_at_its_byte(s3_shards, proxy):
    proxy.faults = [Fault("cut", at=700), Fault("cut", at=300)]
    span = s3_shards.spans[5]
    with SpanReader(store_options=proxied(proxy)) as reader:
        ((tag, result),) = read(reader, [(5, span)])
        s3_shards.assert_equal(tag, result)
        last = span.offset + span.size - 1
        assert proxy.ranges == [f"bytes={span.offset + done}-{last}" for done in (0, 700, 1000)]
        assert reader.metrics.bytes_read == span.size


@pytest.mark.parametrize("kind", ["stall", "slow", "reset"])
def test_bad_connections(s3_shards, proxy, kind):
    proxy.faults = lambda number, _method, _path: (
        Fault(kind, at=500, seconds=5 if kind == "stall" else 0.25) if number % 7 == 0 else None
    )
    totals = read_all(s3_shards, alone(s3_shards), proxied(proxy, read_timeout_s=60 if kind == "slow" else 1))
    num_retries = proxy.seen["GET"] - totals.requests
    assert num_retries == 0 if kind == "slow" else num_retries > 0


def test_refused_connections_are_waited_out(s3_shards, proxy):
    with SpanReader(store_options=proxied(proxy, retry={"max_backoff_s": 2, "backoff_s": 0.1})) as reader:
        read(reader, s3_shards.order()[:1])
        with proxy.refusing():
            reading = reader.begin(s3_shards.spans)
            time.sleep(0.5)
        for tag, result in enumerate(reading.results()):
            s3_shards.assert_equal(tag, result)


def test_flipped_byte_on_the_way_is_read_again(s3_shards, proxy):
    proxy.faults = [None, Fault("flip", at=40), None]
    totals = read_all(s3_shards, alone(s3_shards), proxied(proxy))
    assert (totals.rereads, totals.bad_samples) == (1, 0)


def test_flipped_byte_at_rest_is_a_bad_sample(s3_shards, s3_server):
    store = open_store(s3_shards.root, s3_server.options)
    span = s3_shards.spans[3]
    blob = bytearray(store.get(span.path))
    blob[span.offset + 70] ^= 4
    store.put(span.path, bytes(blob))
    with SpanReader(store_options=s3_server.options) as reader:
        results = dict(read(reader, enumerate(s3_shards.spans)))
    bad = results.pop(3)
    assert isinstance(bad, BadSampleError)
    assert bad.reason == "crc_mismatch"
    assert f"bytes {span.offset}..{span.offset + span.size} of {s3_shards.root}/{span.path}" in str(bad)
    for tag, result in results.items():
        s3_shards.assert_equal(tag, result)


def test_other_etag_or_size_is_an_error(s3_shards, s3_server):
    store = open_store(s3_shards.root, s3_server.options)
    etag = store.head(s3_shards.spans[0].path).etag
    same = s3_shards.spans[0]._replace(etag=etag)
    with SpanReader(store_options=s3_server.options) as reader:
        ((_, result),) = read(reader, [(0, same)])
        s3_shards.assert_equal(0, result)
        other = same._replace(etag="0123")
        with pytest.raises(ChangedObjectError, match=r"etag .* instead of 0123"):
            read(reader, [(0, other)])
        longer = same._replace(shard_size=17)
        with pytest.raises(ChangedObjectError, match=r"bytes instead of 17"):
            read(reader, [(0, longer)])


@pytest.mark.parametrize("cached", [False, True])
def test_samples_of_an_object_that_was_cut_short_are_bad_or_whole(s3_shards, s3_server, tmp_path, cached):
    first = s3_shards.spans[0]
    spans = [(n, span) for n, span in enumerate(s3_shards.spans) if span.path == first.path]
    store = open_store(s3_shards.root, s3_server.options)
    store.put(first.path, store.get(first.path)[: spans[2][1].offset])
    options = ReadOptions(cache_dir=str(tmp_path), cache_bytes=1 << 30) if cached else ReadOptions()
    with SpanReader(options, store_options=s3_server.options) as reader:
        results = dict(read(reader, spans))
    for number, _ in spans[:2]:
        s3_shards.assert_equal(number, results.pop(number))
    assert {result.reason for result in results.values()} == {"truncated"}


def test_samples_of_a_missing_shard_are_bad(s3_shards, s3_server):
    span = s3_shards.spans[0]._replace(path="no-such.tar")
    with SpanReader(store_options=s3_server.options) as reader:
        (_, bad), (_, good) = read(reader, [(0, span), (1, s3_shards.spans[1])])
    assert (bad.reason, str(bad).endswith("The sample is left out.")) == ("missing_shard", True)
    s3_shards.assert_equal(1, good)


def test_an_object_replaced_during_a_read_is_not_mixed(s3_shards, s3_server, proxy):
    span = s3_shards.spans[0]
    store = open_store(s3_shards.root, s3_server.options)
    blob = store.get(span.path)

    def replace_then_cut(number, _method, _path):
        if number == 1:
            store.put(span.path, blob[::-1])
        return Fault("cut", at=200) if number == 0 else None

    proxy.faults = replace_then_cut
    with (
        SpanReader(store_options=proxied(proxy)) as reader,
        pytest.raises(ChangedObjectError, match="was replaced while it was being read"),
    ):
        read(reader, [(0, span)])


def test_404_and_403_fail_at_once(s3_shards, s3_server, proxy, monkeypatch):
    missing = s3_shards.spans[0]._replace(path="no-such.tar")
    with SpanReader(store_options=proxied(proxy)) as reader:
        ((_, bad),) = read(reader, [(0, missing)])
    assert f"nothing at {s3_shards.root}/no-such.tar. Check the bucket" in str(bad)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with (
        SpanReader(store_options=proxied(proxy)) as reader,
        pytest.raises(AccessError, match=rf"refused the request for {s3_shards.root}/.*Check the credentials"),
    ):
        read(reader, [(0, s3_shards.spans[0])])
    assert proxy.seen["GET"] == 2


def test_retries_and_deadline_run_out(s3_shards, proxy):
    proxy.faults = lambda *_: Fault("status", status=500)
    with (
        SpanReader(store_options=proxied(proxy, retry={"max_retries": 2})) as reader,
        pytest.raises(StorageError, match=r"could not be read or written in .* with retries"),
    ):
        read(reader, [(0, s3_shards.spans[0])])
    assert proxy.seen["GET"] == 3
    proxy.faults = lambda *_: Fault("status", status=503)
    with (
        SpanReader(store_options=proxied(proxy, retry={"deadline_s": 0.3})) as reader,
        pytest.raises(StorageError, match="raise max_retries and deadline_s"),
    ):
        read(reader, [(0, s3_shards.spans[0])])


def test_a_body_that_drips_ends_at_the_deadline(s3_shards, proxy):
    proxy.faults = lambda *_: Fault("slow", seconds=0.2)
    with (
        SpanReader(store_options=proxied(proxy, retry={"deadline_s": 0.5})) as reader,
        pytest.raises(StorageError, match="could not be read or written in"),
    ):
        read(reader, [(0, s3_shards.spans[0])])


def test_everything_at_once_gives_the_same_samples_in_the_same_order(s3_shards, proxy):
    proxy.faults = FaultMix(failing=0.05, throttled=0.1, cut=0.2, seed=1)
    for seed in range(3):
        read_all(s3_shards, alone(s3_shards), proxied(proxy), seed)


def test_no_more_requests_in_flight_than_allowed(s3_shards, s3_server, monkeypatch):
    num_open = max_open = 0
    fetch = ObjectStore.fetch_async

    async def counted(*args):
        nonlocal num_open, max_open
        num_open += 1
        max_open = max(max_open, num_open)
        try:
            return await fetch(*args)
        finally:
            num_open -= 1

    monkeypatch.setattr(ObjectStore, "fetch_async", counted)
    read_all(s3_shards, dataclasses.replace(alone(s3_shards), max_inflight=3), s3_server.options)
    assert max_open == 3


def test_budgets_hold_requests_back(s3_shards, s3_server):
    spans = list(enumerate(s3_shards.spans[:4]))
    options = dataclasses.replace(alone(s3_shards), bytes_per_s=sum(span.size for _, span in spans) / 3)
    begun = time.monotonic()
    with SpanReader(options, store_options=s3_server.options) as reader:
        read(reader, spans)
    assert time.monotonic() - begun >= 1.5  # one second's worth is free, the other two are waited for


def test_leaving_early_leaves_no_thread_and_no_connection(s3_server, proxy, request):
    shards = write_shards(s3_server.url(request.node.name), num_shards=2, options=s3_server.options)
    before = set(threading.enumerate())
    proxy.faults = lambda number, *_: Fault("slow", seconds=0.2) if number > 3 else None
    with SpanReader(alone(shards), store_options=proxied(proxy)) as reader:
        reading = reader.begin(shards.spans)
        while proxy.seen.total() < 6:
            time.sleep(0.01)
        reading.cancel()
    wait_for(lambda: not any("vlm-stream" in thread.name for thread in set(threading.enumerate()) - before))
    wait_for(lambda: not proxy._sockets)


def test_a_cancelled_reading_asks_for_nothing_more(s3_shards, proxy):
    proxy.faults = lambda *_: Fault("status", status=503)
    with SpanReader(store_options=proxied(proxy)) as reader:
        reading = reader.begin(s3_shards.spans)
        while proxy.seen.total() < 3:
            time.sleep(0.01)
        reading.cancel()
        time.sleep(1.0)  # what is on its way arrives
        num_seen = proxy.seen.total()
        time.sleep(1.0)
        assert proxy.seen.total() == num_seen
        proxy.faults = []
        for tag, result in read(reader, s3_shards.order()):
            s3_shards.assert_equal(tag, result)


def test_closing_under_a_running_read_says_so(s3_shards, proxy):
    proxy.faults = lambda number, *_: Fault("slow", seconds=1.0) if number > 3 else None
    options = dataclasses.replace(alone(s3_shards), max_inflight=4)
    with SpanReader(options, store_options=proxied(proxy)) as reader:
        reading = reader.begin(s3_shards.spans)
        reader.close()
        with pytest.raises(StorageError, match="The reading was cancelled, or its reader closed"):
            reading.results()


def test_a_server_that_is_down_for_longer_is_waited_out_until_the_deadline(s3_shards, proxy):
    """It has answered before, so the deadline ends a read, not the number of retries."""
    with SpanReader(store_options=proxied(proxy, retry={"max_retries": 2})) as reader:
        read(reader, s3_shards.order()[:1])
        with proxy.refusing():
            reading = reader.begin(s3_shards.spans[:3])
            time.sleep(3)
        for tag, result in enumerate(reading.results()):
            s3_shards.assert_equal(tag, result)


def test_a_server_that_has_answered_another_process_is_waited_out_from_the_first_read_on(s3_shards, proxy):
    """As that of a builder, which is started, or replaced, while the server is down."""
    options = proxied(proxy, retry={"max_retries": 1, "backoff_s": 0.01, "max_backoff_s": 0.5})
    reader = pickle.loads(pickle.dumps(SpanReader(store_options=options, have_answered=True)))
    with reader:
        with proxy.refusing():
            reading = reader.begin(s3_shards.spans[:3])
            time.sleep(3)
        for tag, result in enumerate(reading.results()):
            s3_shards.assert_equal(tag, result)
    with (
        proxy.refusing(),
        SpanReader(store_options=options) as reader,
        pytest.raises(StorageError, match=r"could not be read or written in .* with retries"),
    ):
        read(reader, [(0, s3_shards.spans[0])])


def test_bodies_of_a_wrong_length_are_read_again(s3_shards, proxy):
    proxy.faults = lambda number, *_: Fault("length", at=100) if number % 7 == 0 else None
    totals = read_all(s3_shards, alone(s3_shards), proxied(proxy, read_timeout_s=2))
    assert proxy.seen["GET"] > totals.requests


def test_stale_bytes_are_read_again_and_then_named(s3_shards, proxy):
    proxy.faults = [Fault("stale")]
    read_all(s3_shards, alone(s3_shards), proxied(proxy))
    proxy.faults = lambda *_: Fault("stale")
    with SpanReader(store_options=proxied(proxy)) as reader:
        results = [result for _, result in read(reader, s3_shards.order()[:5])]
    assert {result.reason for result in results} == {"crc_mismatch"}
