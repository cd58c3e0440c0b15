"""Storage: the only room that touches bytes at rest.

Enters: URLs, and spans in plan order. Leaves: bytes, and samples as `{member: content}` in the same order, verified.
It must not know: tar headers, indexes, plans, processors.

In the order the data meets them: `values.py` (spans, objects), `url.py`, `options.py`, `store.py` (the interface and
`open_store`), then the stores: `local.py`, `memory.py`, `remote.py` (S3, GCS, Azure, web; with `client.py` and
`credentials.py`), `hub.py`. A reader: `reader.py` (what a process holds), `read_ahead.py` (order, how far ahead),
`coalesce.py` (spans -> requests), `engine.py` (threads), `fetch.py` (one range, whatever happens) with `retry.py` (the
policy), `faults.py` (what clients say) and `traffic.py` (slots, budgets), `shard_download.py` and `cache.py` (the node
cache), `verify.py` (checksums, members), `metrics.py`. Stores and readers may be pickled, or carried over a fork.
"""

from __future__ import annotations

from vlm_stream.storage.metrics import ReadTotals
from vlm_stream.storage.object_reader import ObjectReader
from vlm_stream.storage.options import ReadOptions, RetryOptions, StoreOptions
from vlm_stream.storage.reader import SpanReader, SpanResult
from vlm_stream.storage.store import Store, open_store
from vlm_stream.storage.tar_urls import expand_urls
from vlm_stream.storage.url import join_url, scheme_of, split_url
from vlm_stream.storage.values import Member, ObjectInfo, Span
from vlm_stream.storage.verify import crc32c_of

__all__ = [
    "Member",
    "ObjectInfo",
    "ObjectReader",
    "ReadOptions",
    "ReadTotals",
    "RetryOptions",
    "Span",
    "SpanReader",
    "SpanResult",
    "Store",
    "StoreOptions",
    "crc32c_of",
    "expand_urls",
    "join_url",
    "open_store",
    "scheme_of",
    "split_url",
]
