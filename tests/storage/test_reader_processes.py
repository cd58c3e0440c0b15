"""Readers and stores in child processes: forked after the parent has used the client, spawned, and forked twice."""

from __future__ import annotations

import multiprocessing

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from vlm_stream.storage import SpanReader, open_store

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

_PATIENCE_S = 60


def _read_in_child(reader, spans, out):
    out.put([{name: bytes(view) for name, view in result.items()} for _, result in reader.read(enumerate(spans))])
    reader.close()


def _read_in_grandchild(reader, spans, out):
    # The child uses the client too, so that its own child inherits a runtime twice removed.
    list(reader.read(enumerate(spans[:3])))
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(reader, spans, out))
    child.start()
    child.join(_PATIENCE_S)


@pytest.mark.parametrize(
    ("method", "target"), [("fork", _read_in_child), ("spawn", _read_in_child), ("fork", _read_in_grandchild)]
)
def test_a_reader_that_was_used_goes_on_in_a_child(s3_shards, s3_server, method, target):
    context = multiprocessing.get_context(method)
    with SpanReader(store_options=s3_server.options) as reader:
        for tag, result in reader.read(enumerate(s3_shards.spans)):
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
        for tag, result in reader.read(s3_shards.order()):
            s3_shards.assert_equal(tag, result)


class _Samples(IterableDataset):
    def __init__(self, store, spans, options):
        self.store, self.spans, self.options = store, spans, options

    def __iter__(self):
        info = get_worker_info()
        self.store.head(self.spans[0].path)
        mine = list(enumerate(self.spans))[info.id :: info.num_workers]
        with SpanReader(store_options=self.options) as reader:
            for tag, result in reader.read(mine):
                yield tag, {name: bytes(view) for name, view in result.items()}


def test_loader_workers_read_after_the_parent_has_read(s3_shards, s3_server):
    store = open_store(s3_shards.root, s3_server.options)
    assert len(list(store.list())) == 3
    dataset = _Samples(store, s3_shards.spans, s3_server.options)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=_PATIENCE_S)
    seen = dict(loader)
    assert [seen[tag] for tag in range(len(s3_shards.spans))] == s3_shards.contents
