"""Storage: bytes at rest, local or remote.

Enters: URLs, and the spans of a batch. Leaves: bytes, and samples as `{member: content}` in the order of the spans,
verified. It must not know tar headers, indexes, plans or processors.

In the order the data meets them: `options.py`; `tar_urls.py` (patterns -> tars); `store.py` (URLs, the interface,
`open_store`); the stores: `local.py`, `remote.py` (S3, GCS, Azure, web; with `credentials.py`), `hub.py`. Reading:
`spans.py` (spans -> requests, bytes -> members), `reader.py` (what runs them, counters), `downloads.py` (shards into
the node cache, also before they are due), `cache.py` (its files), `foresight.py` (what it knows of the plans of jobs).
"""

from vlm_stream.storage.cache import cache_folder
from vlm_stream.storage.foresight import Forecast, Uses
from vlm_stream.storage.options import ReadOptions, RetryOptions, StoreOptions
from vlm_stream.storage.reader import Reading, ReadTotals, SpanReader, SpanResult
from vlm_stream.storage.spans import Member, RangeRequest, ShardKey, Span, crc32c_of, plan_requests
from vlm_stream.storage.store import (
    ObjectInfo,
    ObjectReader,
    Store,
    host_of,
    is_under,
    join_url,
    local_path,
    open_store,
    scheme_of,
    split_url,
)
from vlm_stream.storage.tar_urls import expand_braces, expand_urls, names_tars
