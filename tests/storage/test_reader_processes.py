"""Readers and stores in child processes: forked after the parent has used the client, spawned, and forked twice."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.storage.shard_data import read
from vlm_stream.storage import SpanReader

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

_PATIENCE_S = 60


def _read_in_child(reader, spans, out):
    out.put([{name: bytes(view) for name, view in result.items()} for _, result in read(reader, enumerate(spans))])
    reader.close()


def _read_in_grandchild(reader, spans, out):
    # The child uses the client too, so that its own child inherits a runtime twice removed.
    read(reader, enumerate(spans[:3]))
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(reader, spans, out))
    child.start()
    child.join(_PATIENCE_S)


@pytest.mark.parametrize(
    ("method", "target"), [("fork", _read_in_child), ("spawn", _read_in_child), ("fork", _read_in_grandchild)]
)
def test_a_reader_that_was_used_goes_on_in_a_child(s3_shards, s3_server, method, target):
    context = multiprocessing.get_context(method)
    with SpanReader(store_options=s3_server.options) as reader:
        for tag, result in read(reader, enumerate(s3_shards.spans)):
            s3_shards.assert_equal(tag, result)
        out = context.Queue()
        child = context.Process(target=target, args=(reader, s3_shards.spans, out))
        child.start()
        try:
            assert out.get(timeout=_PATIENCE_S) == s3_shards.contents
            child.join(_PATIENCE_S)
            assert child.exitcode == 0
        finally:
            child.kill()
        # The parent's threads and connections are untouched by what the child did.
        for tag, result in read(reader, s3_shards.order()):
            s3_shards.assert_equal(tag, result)
