"""Stores and readers in the workers of a real DataLoader, forked after the parent has used the client."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.storage.shard_data import read
from vlm_stream.storage import SpanReader, open_store

_PATIENCE_S = 60


class _Samples(IterableDataset):
    def __init__(self, store, spans, options):
        self.store, self.spans, self.options = store, spans, options

    def __iter__(self):
        info = get_worker_info()
        self.store.head(self.spans[0].path)
        mine = list(enumerate(self.spans))[info.id :: info.num_workers]
        with SpanReader(store_options=self.options) as reader:
            for tag, result in read(reader, mine):
                yield tag, {name: bytes(view) for name, view in result.items()}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_loader_workers_read_after_the_parent_has_read(s3_shards, s3_server):
    store = open_store(s3_shards.root, s3_server.options)
    assert len(list(store.list())) == 3
    dataset = _Samples(store, s3_shards.spans, s3_server.options)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=_PATIENCE_S)
    seen = dict(loader)
    assert [seen[tag] for tag in range(len(s3_shards.spans))] == s3_shards.contents
