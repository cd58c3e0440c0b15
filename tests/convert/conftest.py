from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from vlm_stream.convert import make_shards
from vlm_stream.testing import make_toy_dataset


@pytest.fixture(scope="session")
def toy_meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A meta file over 200 samples: images, several images, videos, text only."""
    return Path(make_toy_dataset(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="session")
def toy_shards(toy_meta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy dataset as shards of 64 (shared: copy it before changing it)."""
    out = tmp_path_factory.mktemp("shards") / "out"
    make_shards(toy_meta, out, samples_per_shard=64)
    return out


@pytest.fixture
def write_jsonl(tmp_path: Path):
    """Write records as JSON lines and return the path."""

    def write(records: list[object], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


@pytest.fixture
def digests():
    """Return name -> sha256 of every file of a dataset."""

    def of(folder: Path) -> dict[str, str]:
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    return of
