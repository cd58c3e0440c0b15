"""The folder of toy data, made once, and the names that pages find ready."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.world import build_world

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import S3Server


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with everything that pages name, and the processor of its shards."""
    folder = tmp_path_factory.mktemp("world")
    return folder, build_world(folder)


@pytest.fixture
def folder(world: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, as the working directory."""
    copy = tmp_path / "work"
    shutil.copytree(world[0], copy)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return copy


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The real S3 server as users reach theirs: by the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return s3_server


@pytest.fixture
def family_table() -> Iterator[None]:
    """Take back the families that a page registers."""
    from vlm_stream.collate import families

    kept = dict(families._FAMILIES)
    yield
    families._FAMILIES.clear()
    families._FAMILIES.update(kept)
