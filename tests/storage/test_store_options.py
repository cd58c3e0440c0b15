from __future__ import annotations

import pytest

from vlm_stream.errors import ConfigError
from vlm_stream.storage import ReadOptions, RetryOptions, StoreOptions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReadOptions(cache_dir="x"), "cache_dir and cache_bytes belong together"),
        (lambda: ReadOptions(cache_bytes=5), "cache_dir and cache_bytes belong together"),
        (lambda: RetryOptions(max_retries=-1), "RetryOptions.max_retries is -1, but must be at least 0"),
        (lambda: RetryOptions(backoff_s=5, max_backoff_s=1), "max_backoff_s is 1, but must be at least 5"),
        (lambda: RetryOptions(deadline_s=0), "deadline_s is 0"),
        (lambda: StoreOptions(read_timeout_s=0), "read_timeout_s is 0"),
        (lambda: StoreOptions(endpoint="minio:9000"), "must begin with http:// or https://"),
        (lambda: StoreOptions(endpoint="http://minio:9000"), "not encrypted.*set allow_http"),
        (lambda: StoreOptions(endpoint="https://key:secret@minio"), "Remove the part before '@'"),
    ],
)
def test_refused_values(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "secret" not in str(caught.value)
