"""Data that all trainers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vlm_stream.testing.conformance import make_data

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def workers_of_refused_loaders_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's loaders wait less for workers that nobody has told to end: those whose loader raised as it began."""
    from torch.utils.data import _utils

    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


@pytest.fixture(scope="session")
def conformance_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy shards and their processor, made once."""
    return make_data(tmp_path_factory.mktemp("conformance"))
