from __future__ import annotations

import pytest

from tests.storage.shard_data import write_shards
from vlm_stream.chaos import FaultProxy


@pytest.fixture
def local_shards(tmp_path):
    return write_shards(str(tmp_path / "data"))


@pytest.fixture
def s3_shards(s3_server, request):
    """Shards in a folder of their own on the S3 server."""
    return write_shards(s3_server.url(request.node.name), options=s3_server.options)


@pytest.fixture
def proxy(s3_server):
    """A proxy before the S3 server, without faults until a test sets some."""
    with FaultProxy(s3_server.port) as running:
        yield running
