"""Readers and stores in child processes: pickled to fresh ones, refused in one that was forked after use."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.storage.shard_data import read
from vlm_stream.errors import StorageError
from vlm_stream.storage import SpanReader, open_store

_PATIENCE_S = 240


def _read_in_child(reader, spans, out, environment):
    os.environ.update(environment)  # a fork server has that of its start
    try:
        results = read(reader, enumerate(spans))
        out.put([{name: bytes(view) for name, view in result.items()} for _, result in results])
    except StorageError as error:
        out.put(str(error))
    reader.close()


def _result_of_child(method, reader, spans):
    context = multiprocessing.get_context(method)
    out = context.Queue()
    child = context.Process(target=_read_in_child, args=(reader, spans, out, dict(os.environ)))
    child.start()
    try:
        found = out.get(timeout=_PATIENCE_S)
        child.join(_PATIENCE_S)
        assert child.exitcode == 0
        return found
    finally:
        child.kill()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_reader_that_was_used_goes_on_in_a_child(s3_shards, s3_server, method):
    with SpanReader(store_options=s3_server.options) as reader:
        read(reader, enumerate(s3_shards.spans))
        assert _result_of_child(method, reader, s3_shards.spans) == s3_shards.contents
        for tag, result in read(reader, s3_shards.order()):
            s3_shards.assert_equal(tag, result)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_was_forked_after_a_remote_read_is_refused(s3_shards, local_shards, s3_server):
    with SpanReader(store_options=s3_server.options) as reader:
        read(reader, enumerate(s3_shards.spans[:3]))
        said = _result_of_child("fork", reader, s3_shards.spans)
        assert "was forked from process" in said
        assert "Start worker processes by 'forkserver' or 'spawn'" in said
        # Local files may be read there, and the parent's connections are untouched.
        assert _result_of_child("fork", reader, local_shards.spans) == local_shards.contents
        for tag, result in read(reader, s3_shards.order()):
            s3_shards.assert_equal(tag, result)


class _Samples(IterableDataset):
    def __init__(self, store, spans, options):
        self.store, self.spans, self.options = store, spans, options
        self.environment = dict(os.environ)

    def __iter__(self):
        os.environ.update(self.environment)
        info = get_worker_info()
        self.store.head(self.spans[0].path)
        mine = list(enumerate(self.spans))[info.id :: info.num_workers]
        with SpanReader(store_options=self.options) as reader:
            for tag, result in read(reader, mine):
                yield tag, {name: bytes(view) for name, view in result.items()}


def test_workers_of_a_loader_read_after_the_parent_has_read(s3_shards, s3_server):
    store = open_store(s3_shards.root, s3_server.options)
    assert len(list(store.list())) == 3
    dataset = _Samples(store, s3_shards.spans, s3_server.options)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="forkserver", timeout=_PATIENCE_S
    )
    seen = dict(loader)
    assert [seen[tag] for tag in range(len(s3_shards.spans))] == s3_shards.contents
