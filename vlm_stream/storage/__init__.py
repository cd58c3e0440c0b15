"""Storage: bytes at rest, local or remote.

Enters: URLs, and the spans of a batch. Leaves: bytes, and samples as `{member: content}` in the order of the spans,
verified. It must not know tar headers, indexes, plans or processors.

In the order the data meets them: `options.py`; `tar_urls.py` (patterns -> tars); `store.py` (URLs, the interface,
`open_store`); the stores: `local.py`, `remote.py` (S3, GCS, Azure, web; with `credentials.py`), `hub.py`. Reading:
`spans.py` (spans -> requests, bytes -> members), `reader.py` (what runs them, counters), `cache.py` (the node cache).
"""

from __future__ import annotations

from vlm_stream.storage.options import ReadOptions, RetryOptions, StoreOptions
from vlm_stream.storage.reader import Reading, ReadTotals, SpanReader, SpanResult
from vlm_stream.storage.spans import Member, RangeRequest, Span, crc32c_of, plan_requests
from vlm_stream.storage.store import (
    ObjectInfo,
    ObjectReader,
    Store,
    join_url,
    local_path,
    open_store,
    scheme_of,
    split_url,
)
from vlm_stream.storage.tar_urls import expand_urls, names_tars

__all__ = [
    "Member",
    "ObjectInfo",
    "ObjectReader",
    "RangeRequest",
    "ReadOptions",
    "ReadTotals",
    "Reading",
    "RetryOptions",
    "Span",
    "SpanReader",
    "SpanResult",
    "Store",
    "StoreOptions",
    "crc32c_of",
    "expand_urls",
    "join_url",
    "local_path",
    "names_tars",
    "open_store",
    "plan_requests",
    "scheme_of",
    "split_url",
]
