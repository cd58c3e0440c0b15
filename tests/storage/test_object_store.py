from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import threading
import time

import pytest

from tests.waiting import wait_for
from vlm_stream.chaos import Fault
from vlm_stream.errors import AccessError, NotFoundError, StorageError
from vlm_stream.storage import RetryOptions, open_store


@pytest.fixture
def store(s3_server, request):
    return open_store(s3_server.url(request.node.name), s3_server.options)


def test_put_get_ranges_head_list_delete(store):
    store.put("a/b.bin", b"0123456789")
    assert store.get("a/b.bin") == b"0123456789"
    assert store.get_ranges("a/b.bin", [(2, 3), (8, 100), (0, 0)]) == [b"234", b"89", b""]
    assert store.get_ranges("a/b.bin", [(100, 3)]) == [b""]
    info = store.head("a/b.bin")
    assert (info.path, info.size) == ("a/b.bin", 10)
    assert info == next(store.list())
    assert info.etag
    assert '"' not in info.etag
    store.put("a/bb.bin", b"x")
    store.put("c.bin", b"x")
    assert [info.path for info in store.list()] == ["a/b.bin", "a/bb.bin", "c.bin"]
    assert [info.path for info in store.list("a/b")] == ["a/b.bin", "a/bb.bin"]
    assert [info.path for info in store.list("a/bb")] == ["a/bb.bin"]
    store.delete("a/b.bin")
    with pytest.raises(NotFoundError, match=r"There is nothing at s3://test-bucket/.*/a/b.bin"):
        store.head("a/b.bin")


def test_large_writes_go_in_parts_and_come_back_whole(store, tmp_path):
    data = bytes(range(256)) * (20 * 1024 * 4 + 1)
    (tmp_path / "file").write_bytes(data)
    for number, source in enumerate((data, tmp_path / "file")):
        store.put(f"large-{number}", source)
        assert store.get(f"large-{number}") == data


def test_stores_travel_by_pickle_without_secrets(store):
    store.put("x", b"1")
    payload = pickle.dumps(store)
    assert b"testsecret" not in payload
    assert pickle.loads(payload).get("x") == b"1"
    assert "testsecret" not in repr(store)


def test_missing_bucket_and_wrong_key_say_what_to_check(s3_server, monkeypatch):
    with pytest.raises(NotFoundError, match="Check the bucket, the path and the endpoint"):
        open_store("s3://no-such-bucket/x", s3_server.options).get("y")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(AccessError, match="Check the credentials") as caught:
        open_store(s3_server.url("x"), s3_server.options).get("y")
    assert "wrong-secret" not in str(caught.value)


def test_anonymous_requests_are_not_signed(s3_server):
    options = dataclasses.replace(s3_server.options, anonymous=True)
    with pytest.raises(AccessError, match="anonymous=True"):
        open_store(s3_server.url("x"), options).get("ready")


def test_writes_are_tried_again(s3_server, proxy):
    store = open_store(s3_server.url("writes"), dataclasses.replace(s3_server.options, endpoint=proxy.endpoint))
    proxy.faults = [Fault("status", status=500), Fault("reset"), None, Fault("status", status=503)]
    store.put("x", b"1")
    assert store.head("x").size == 1
    assert proxy.faults == []


def test_a_write_that_fails_half_way_leaves_no_object(s3_server, proxy):
    options = dataclasses.replace(s3_server.options, endpoint=proxy.endpoint, retry=RetryOptions(max_retries=1))
    store = open_store(s3_server.url("half"), options)
    proxy.faults = lambda _number, _method, path: Fault("status", status=500) if "partNumber=2" in path else None
    with pytest.raises(StorageError, match=r"half/x could not be read or written in .* with retries"):
        store.put("x", bytes(40_000_000))
    with pytest.raises(NotFoundError, match="There is nothing at"):
        store.head("x")


def test_an_interrupt_ends_a_request_that_gets_no_answer(s3_server, proxy):
    store = open_store(s3_server.url("interrupt"), dataclasses.replace(s3_server.options, endpoint=proxy.endpoint))
    store.put("x", bytes(1000))
    proxy.faults = [Fault("stall", at=10, seconds=30)]

    def interrupt():
        wait_for(lambda: proxy.seen["GET"])
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    try:
        threading.Thread(target=interrupt).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            store.get("x")
        assert time.monotonic() - begun < 25
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_environment_alone_is_enough(s3_server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = open_store(s3_server.url("by-environment"))
    store.put("one", b"1")
    assert store.get("one") == b"1"
