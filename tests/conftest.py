"""Fixtures for every room."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.servers import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def running_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start one S3 server for the whole run."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_server(running_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server: `.url("folder")`, `.options` for `open_store`, and its keys in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in running_s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return running_s3_server
