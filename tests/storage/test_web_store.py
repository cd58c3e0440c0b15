"""Plain web servers, with and without TLS, and the Hub."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from tests.storage.shard_data import read, write_shards
from tests.storage.web_server import HubServer, WebServer, make_certificate
from vlm_stream.errors import ConfigError, NotFoundError, StorageError
from vlm_stream.storage import RetryOptions, SpanReader, StoreOptions, open_store

QUICK = RetryOptions(max_retries=1, backoff_s=0.01)


@pytest.fixture
def files(tmp_path):
    """Shards, as a web server's files."""
    shards = write_shards(str(tmp_path / "shards"))
    store = open_store(shards.root)
    return shards, {f"data/{info.path}": store.get(info.path) for info in store.list()}


def moved(shards, root):
    """Return the same samples under another root."""
    return dataclasses.replace(shards, root=root, spans=[s._replace(root=root) for s in shards.spans])


def read_all(shards, options):
    with SpanReader(store_options=options) as reader:
        for tag, result in read(reader, shards.order()):
            shards.assert_equal(tag, result)


def test_http_ranges(files):
    shards, served = files
    with WebServer(served) as server:
        read_all(moved(shards, f"{server.url}/data"), StoreOptions())
        store = open_store(f"{server.url}/data/")
        path = shards.spans[0].path
        assert store.head(path).size == shards.spans[0].shard_size
        assert store.get(path) == served[f"data/{path}"]
        assert store.get_ranges(path, [(10**9, 5)]) == [b""]
        with pytest.raises(NotFoundError, match=r"There is nothing at http://127.0.0.1:.*/data/none"):
            store.get("none")
        with pytest.raises(StorageError, match="plain web server, which cannot list its files"):
            list(store.list())
        with pytest.raises(StorageError, match="plain web server, which takes no files"):
            store.put("new", b"x")


def test_https_with_a_private_authority(files, tmp_path):
    shards, served = files
    certificate, authority = make_certificate(tmp_path)
    with WebServer(served, certificate=certificate) as server:
        read_all(moved(shards, f"{server.url}/data"), StoreOptions(ca_file=str(authority)))
        with pytest.raises(StorageError, match=r"certificate of the server of .* is not trusted.*set ca_file"):
            open_store(f"{server.url}/data", StoreOptions(retry=QUICK)).get(shards.spans[0].path)
        with pytest.raises(ConfigError, match=r"ca_file .* cannot be read"):
            open_store(server.url, StoreOptions(ca_file=str(tmp_path / "none"))).get("x")


def test_a_server_without_ranges_is_refused(files):
    shards, served = files
    with WebServer(served, ranges=False) as server, SpanReader() as reader:
        moved_shards = moved(shards, f"{server.url}/data")
        with pytest.raises(StorageError, match="does not serve byte ranges"):
            read(reader, enumerate(moved_shards.spans))


def test_hub_datasets(files):
    shards, served = files
    with HubServer(served) as server:
        options = StoreOptions(endpoint=server.url, allow_http=True, anonymous=True, retry=QUICK)
        root = "hf://datasets/owner/name/data"
        store = pickle.loads(pickle.dumps(open_store(root, options)))
        assert [info.path for info in store.list()] == [f"part/shard-{n:06d}.tar" for n in range(3)]
        assert store.get(shards.spans[0].path) == served[f"data/{shards.spans[0].path}"]
        assert store.get_ranges(shards.spans[0].path, [(5, 10), (10**9, 5)])[1] == b""
        read_all(moved(shards, root), options)
        with pytest.raises(NotFoundError, match="There is nothing at hf://datasets/owner/name/data/part/none"):
            store.get("part/none")
    with pytest.raises(ConfigError, match="write hf://datasets/owner/name/folder"):
        open_store("hf://owner/name")
