"""Keys that a training run is given, in every way in, are in nothing that it gives out."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.servers import ACCESS_KEY, SECRET_KEY
from vlm_stream import StreamLoader
from vlm_stream.errors import VlmStreamError
from vlm_stream.storage import RetryOptions, StoreOptions, open_store
from vlm_stream.world import World

if TYPE_CHECKING:
    from tests.servers import S3Server

SECRETS = (
    SECRET_KEY, "wrong-hunter2-SECRET", "hunter2-SESSION", "hunter2-HUB", "hunter2-PROCESSOR", "hunter2-PASSWORD",
    "hunter2-SIGNATURE", "hunter2-AZURE",
)  # fmt: skip
STREAM = {"mode": "plain", "batch_size": 4, "with_refs": True, "bad_budget": None, "window": 32}
QUICK = RetryOptions(max_retries=0, deadline_s=5.0)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3_server: S3Server) -> StoreOptions:
    """Plant keys in the environment and in profiles; return how the store is reached with the right ones."""
    (tmp_path / "credentials").write_text(
        f"[right]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        f"[wrong]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRETS[1]}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("HF_TOKEN", "hunter2-HUB")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "hunter2-AZURE")
    return StoreOptions(endpoint=s3_server.endpoint, region="us-east-1", allow_http=True, profile="right", retry=QUICK)


def _put_damaged(shards: Path, url: str, options: StoreOptions) -> None:
    """Put a dataset into the store, with one sample that is damaged, so that the ledger has a line."""
    store = open_store(url, options)
    for path in sorted(shards.iterdir()):
        data = bytearray(path.read_bytes())
        if path.name == "shard-000001.tar":
            data[4096:4128] = bytes(32)
        store.put(path.name, bytes(data))


def _pages(url: str) -> list[str]:
    """Return the pages of a viewer that its first page leads to."""
    first = urllib.request.urlopen(url, timeout=60).read().decode()
    found = [first]
    for path in sorted(set(re.findall(r'href="(/[^"#]*)"', first)))[:12]:
        try:
            found.append(urllib.request.urlopen(url.rstrip("/") + path, timeout=60).read().decode("latin-1"))
        except urllib.error.HTTPError as error:
            found.append(error.read().decode("latin-1"))
    return found


def _run(url: str, options: StoreOptions, processor: Any, folder: Path) -> list[str]:
    """Train a little, and return all that comes out beside batches."""
    ledger = folder / "ledger.jsonl"
    shown: list[str] = []
    given = {"processor": processor, "store": options, "num_workers": 1, "ledger_path": ledger, **STREAM}
    with StreamLoader(url, **given) as loader:
        (server, _), view = loader.serve_metrics(0), loader.serve_view()
        batches = list(itertools.islice(loader, 15))
        state = loader.state_dict()
        blueprints = [planned.blueprint for planned in loader.stream.plan().blueprints(World(0, 1))]
        shown += [json.dumps(state), json.dumps(loader.metrics()), repr(loader.builders()), repr(loader.costs())]
        shown += [loader.stacks(), repr(loader), repr(loader.stream), repr(blueprints)]
        shown += [pickle.dumps(blueprints).decode("latin-1"), str(loader.show(batches[0])), str(batches[0]["refs"])]
        shown += _pages(view.url)
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        shown.append(urllib.request.urlopen(address, timeout=60).read().decode())
        view.close()
        server.shutdown()
        server.server_close()
        for _ in loader:
            pass
        shown += [repr(each) for each in loader.ledger.newest]
    assert ledger.read_text()
    return [*shown, ledger.read_text()]


def _errors(url: str, options: StoreOptions, wrong: StoreOptions, processor: Any) -> list[str]:
    """Return what runs say that cannot begin."""
    told = []
    name = {"name": "/nowhere/at-all", "token": "hunter2-PROCESSOR"}
    for source, store, given in (
        (url, wrong, processor),
        (url, options, name),
        (url, options, processor | {"revision": 7, "no_such": "hunter2-PASSWORD"}),
        ("http://me:hunter2-PASSWORD@127.0.0.1:9/shards", options, processor),
        ("http://127.0.0.1:9/shards?X-Amz-Signature=hunter2-SIGNATURE", options, processor),
        ("http://me:hunter2-PASSWORD@127.0.0.1:9/{0..2.tar?sig=hunter2-SIGNATURE", options, processor),
        ("s3://me:hunter2-PASSWORD@bucket/shards", options, processor),
        ("http://127.0.0.1:9/{0..2}.tar?sig=hunter2-SIGNATURE", options, processor),
    ):
        try:
            with StreamLoader(source, processor=given, store=store, **STREAM) as loader:
                next(iter(loader))
        except (VlmStreamError, OSError, ValueError, TypeError) as error:
            causes, each = [], error
            while each is not None:
                causes.append(f"{type(each).__name__}: {each}" if isinstance(each, VlmStreamError) else "")
                each = each.__cause__ or each.__context__
            told.append("\n".join(causes))
    assert len(told) >= 5
    return told


def test_keys_of_a_training_run_come_out_nowhere(
    toy_shards: Path,
    saved_processor: Path,
    s3_server: S3Server,
    planted: StoreOptions,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    url = s3_server.url("secrets")
    _put_damaged(toy_shards, url, planted)
    processor = {"name": str(saved_processor), "token": "hunter2-PROCESSOR"}
    wrong = StoreOptions(endpoint=s3_server.endpoint, region="us-east-1", allow_http=True, profile="wrong", retry=QUICK)
    shown = _run(url, planted, processor, tmp_path)
    shown += _errors(url, planted, wrong, processor)
    shown += [caplog.text, *capfd.readouterr()]
    shown += [repr(record.args) for record in caplog.records]
    assert "checksum" in "".join(shown)  # the damaged sample was told of
    for secret in SECRETS:
        assert [text[max(at - 200, 0) : at + 50] for text in shown if (at := text.find(secret)) >= 0] == [], secret
    assert os.environ["HF_TOKEN"] == "hunter2-HUB"
