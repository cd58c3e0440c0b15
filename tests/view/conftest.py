"""Viewers over toy data, in this process and over HTTP."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from vlm_stream.convert import make_shards
from vlm_stream.options import StreamOptions
from vlm_stream.recipe import normalise_sources
from vlm_stream.testing import make_jpeg
from vlm_stream.view import Viewer
from vlm_stream.view.server import make_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def open_viewer(shards: Path, processor: Any = None, **more: Any) -> Viewer:
    options = more.pop("options", None) or StreamOptions(pack_size=1024)
    found = Viewer(normalise_sources(shards), options, processor, **more)
    found.patience_s = 120.0  # pages are compared, and machines are busy
    return found


@pytest.fixture(scope="session")
def viewer(mixed_shards: Path, processor: Any) -> Iterator[Viewer]:
    found = open_viewer(mixed_shards, processor)
    yield found
    found.close()


@pytest.fixture(scope="session")
def client(viewer: Viewer) -> TestClient:
    return TestClient(make_app(viewer))


EVIL = '<script>alert("evil")</script><img src=x onerror=alert(1)>"\'&\x1b[31m\x00'
"""In every field that a dataset has."""


@pytest.fixture(scope="session")
def evil_shards(tmp_path_factory: pytest.TempPathFactory, saved_processor: Path) -> Path:
    """Samples whose every field holds markup: texts, roles, ids, the entry's name, extras of media."""
    folder = tmp_path_factory.mktemp("evil")
    (folder / "a.jpg").write_bytes(make_jpeg(60, 90))
    records = [
        {
            "id": f"{EVIL}{number}",
            "messages": [
                {"role": "system", "content": EVIL},
                {"role": "user", "content": f"<image>{EVIL}" if number % 2 else EVIL},
                {"role": "assistant", "content": EVIL},
            ],
            "images": ["a.jpg"] if number % 2 else [],
            EVIL: EVIL,
        }
        for number in range(6)
    ]
    (folder / "evil.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    entry = EVIL.replace("\x00", "")
    (folder / "meta.json").write_text(json.dumps({entry: {"file_name": "evil.jsonl", "media_dir": str(folder)}}))
    make_shards(folder / "meta.json", folder / "shards", processor=str(saved_processor), samples_per_shard=3)
    return folder / "shards"


__all__ = ["EVIL", "open_viewer"]
