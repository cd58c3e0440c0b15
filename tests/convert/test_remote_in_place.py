"""Tars and tables of others in stores that are not S3, and two machines that index one bucket at the same time.

Web servers and Azure (Azurite) are real. The Hub is a stand-in: a server that answers what huggingface_hub's own client
asks for while it reads a dataset. GCS is one too: SeaweedFS, as its interface for S3 is what GCS's XML interface has in
common with S3, which is what our client reads by.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.foreign_tars import write_captions
from tests.servers import AzureServer, find_azurite
from tests.storage.web_server import HubServer, WebServer
from vlm_stream import StreamLoader
from vlm_stream.cli import main
from vlm_stream.convert import make_shards, verify_dataset
from vlm_stream.errors import AccessError, DatasetError, StorageError
from vlm_stream.sources import open_source
from vlm_stream.storage import RetryOptions, StoreOptions, open_store
from vlm_stream.testing import make_jpeg

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import S3Server
    from vlm_stream.sources import SourceGroup

TARS = "{00000..00003}.tar"
QUESTIONS = [f"What is {part}-{row}?" for part in range(2) for row in range(3)]
QUICK = RetryOptions(max_retries=1, backoff_s=0.01)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the user's cache be a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vlm_stream"


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    write_captions(tmp_path / "tars")
    return tmp_path / "tars"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Two Parquet files as the Hub has them: texts and image structs."""
    folder = tmp_path / "tables" / "data"
    folder.mkdir(parents=True)
    for part in range(2):
        rows = [
            {
                "images": [{"bytes": make_jpeg(30, 40 + part), "path": f"{part}-{row}.jpg"}],
                "texts": [{"user": f"What is {part}-{row}?", "assistant": "A thing."}],
            }
            for row in range(3)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"train-{part:05d}-of-00002.parquet", row_group_size=2)
    return folder.parent


@pytest.fixture(scope="module")
def running_azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    if find_azurite() is None:
        pytest.skip("Azurite is not installed (npm install azurite)")
    with AzureServer(tmp_path_factory.mktemp("azure")) as server:
        yield server


@pytest.fixture
def azure(running_azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> AzureServer:
    """A real server of Azure's Blob protocol, its account in the environment."""
    for name, value in running_azure.environment.items():
        monkeypatch.setenv(name, value)
    return running_azure


def served(folder: Path) -> dict[str, bytes]:
    return {f"data/{path.relative_to(folder)}": path.read_bytes() for path in sorted(folder.rglob("*.*"))}


def keys_of(url: str, **options: object) -> list[str]:
    loader = StreamLoader(url, processor=None, mode="plain", batch_size=4, **options)
    return sorted(sample.key for batch in loader for sample in batch["samples"])


def all_keys(num_tars: int = 4) -> list[str]:
    return [f"{tar:05d}{sample:04d}" for tar in range(num_tars) for sample in range(5)]


def questions_of(source: SourceGroup) -> list[str]:
    return [source.read(row).conversation[0]["content"][-1]["text"] for row in range(len(source))]


def put_all(store_url: str, options: StoreOptions, folder: Path) -> None:
    store = open_store(store_url, options)
    for path in sorted(folder.rglob("*.*")):
        store.put(str(path.relative_to(folder)), path)


def test_tars_of_a_web_server(captions: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with WebServer(served(captions)) as server:
        url = f"{server.url}/data/{TARS}"
        assert keys_of(url) == all_keys()
        (place,) = cache.glob("indexes/*/dataset.json")
        assert str(place.parent) in caplog.text
        caplog.clear()
        assert keys_of(url, num_workers=1) == all_keys()
        assert keys_of(f"{server.url}/data/00000.tar::{server.url}/data/00001.tar") == all_keys(2)
        assert caplog.text.count("indexing") == 1  # of the two tars alone
        assert verify_dataset(url, workers=1).problems == ()
        with pytest.raises(DatasetError, match=r"has no dataset.json"):
            keys_of(f"{server.url}/data")  # it lists nothing
        with pytest.raises(StorageError, match=r"There is nothing at .*/data/00004.tar"):
            keys_of(f"{server.url}/data/{{00000..00004}}.tar")


def test_tars_of_a_web_server_that_change(captions: Path) -> None:
    files = served(captions)
    with WebServer(files) as server:
        url = f"{server.url}/data/{TARS}"
        keys_of(url)
        files["data/00003.tar"] = files["data/00002.tar"]
        assert keys_of(url) == sorted(all_keys(3) + all_keys(3)[-5:])


def test_tars_of_a_web_server_without_ranges(captions: Path) -> None:
    refused = pytest.raises(StorageError, match="does not serve byte ranges")
    with WebServer(served(captions), ranges=False) as server, refused:
        keys_of(f"{server.url}/data/{TARS}")


def test_tars_of_the_hub(captions: Path, cache: Path) -> None:
    with HubServer(served(captions)) as server:
        store = StoreOptions(endpoint=server.url, allow_http=True, anonymous=True, retry=QUICK)
        root = "hf://datasets/owner/name/data"
        for url in (f"{root}/{TARS}", root, f"{root}/*.tar"):
            assert keys_of(url, store=store) == all_keys()
        assert len(list(cache.glob("indexes/*/dataset.json"))) == 1  # it takes no writes, and each names the same tars


def test_tables_of_the_hub(tables: Path) -> None:
    with HubServer(served(tables)) as server:
        store = StoreOptions(endpoint=server.url, allow_http=True, anonymous=True, retry=QUICK)
        for url in ("hf://datasets/owner/name/data", "hf://datasets/owner/name/data/data/train-*.parquet"):
            assert questions_of(open_source(url, store=store)) == QUESTIONS


def test_tars_of_azure(azure: AzureServer, captions: Path, cache: Path) -> None:
    put_all(azure.url("tars"), azure.options, captions)
    assert keys_of(azure.url(f"tars/{TARS}"), store=azure.options) == all_keys()
    listed = [info.path for info in open_store(azure.url("tars"), azure.options).list()]
    assert sum(path.endswith("dataset.json") for path in listed) == 1
    assert keys_of(azure.url("tars"), store=azure.options, num_workers=1) == all_keys()
    assert not (cache / "indexes").exists()


def test_tables_and_shards_of_azure(
    azure: AzureServer, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_all(azure.url("tables"), azure.options, tables)
    for url in (azure.url("tables"), azure.url("tables/data/train-*.parquet")):
        report = make_shards(url, azure.url("shards"), store=azure.options, samples_per_shard=4, overwrite=True)
        assert (report.totals.samples, report.totals.images, report.num_shards) == (6, 6, 2)
    loader = StreamLoader(azure.url("shards"), processor=None, mode="plain", batch_size=2, store=azure.options)
    texts = {sample.conversation()[0]["content"][-1]["text"] for batch in loader for sample in batch["samples"]}
    assert texts == set(QUESTIONS)
    flags = ["--endpoint", azure.endpoint, "--allow-http", "--workers", "1", "--json"]
    assert main(["verify", azure.url("shards"), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_tars_and_tables_of_gcs(s3_server: S3Server, captions: Path, tables: Path, cache: Path) -> None:
    for name, folder in (("tars", captions), ("tables", tables)):
        put_all(s3_server.url(f"public/{name}"), s3_server.options, folder)
    store = StoreOptions(endpoint=s3_server.endpoint, allow_http=True, anonymous=True, retry=QUICK)
    root = f"gs://{s3_server.bucket}/public"
    for url in (f"{root}/tars/{TARS}", f"{root}/tars", f"{root}/tars/*.tar"):
        assert keys_of(url, store=store) == all_keys()
    assert len(list(cache.glob("indexes/*/dataset.json"))) == 1
    for url in (f"{root}/tables", f"{root}/tables/data/train-*.parquet"):
        assert questions_of(open_source(url, store=store)) == QUESTIONS
    with pytest.raises(AccessError, match="GCS takes no unsigned files"):
        open_store(root, store).put("x", b"")


_MACHINE = """
import sys
from vlm_stream import StoreOptions, StreamLoader
loader = StreamLoader(sys.argv[1], processor=None, mode="plain", batch_size=4, rank=int(sys.argv[3]), world_size=2,
                      store=StoreOptions(endpoint=sys.argv[2], region="us-east-1", allow_http=True))
print("ready", flush=True)
sys.stdin.readline()
print(*[sample.key for batch in loader for sample in batch["samples"]])
"""


def test_two_machines_index_one_bucket_at_once(s3_server: S3Server, tmp_path: Path) -> None:
    keys = write_captions(tmp_path / "many", num_tars=8, num_samples=40)
    put_all(s3_server.url("at-once"), s3_server.options, tmp_path / "many")
    url = s3_server.url("at-once/{00000..00007}.tar")
    running = []
    for rank in range(2):
        # Neither a cache nor a folder for locks in common: as two machines.
        own = {"XDG_CACHE_HOME": str(tmp_path / f"cache-{rank}"), "TMPDIR": str(tmp_path / f"tmp-{rank}")}
        Path(own["TMPDIR"]).mkdir()
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", _MACHINE, url, s3_server.endpoint, str(rank)],
                env=os.environ | own | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    assert [err.count("indexing 8 tars") for _, err in results] == [1, 1]  # else they were not at it at once
    assert sorted(key for out, _ in results for key in out.split()) == sorted(keys)
    store = open_store(s3_server.url("at-once"), s3_server.options)
    (manifest,) = (info.path for info in store.list() if info.path.endswith("dataset.json"))
    assert keys_of(url, store=s3_server.options) == sorted(keys)
    assert main(["verify", store.url(manifest.rpartition("/")[0]), "--workers", "1", "--quiet", "--endpoint",
                 s3_server.endpoint, "--region", "us-east-1", "--allow-http"]) == 0  # fmt: skip
