"""Data that all trainers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vlm_stream.testing.conformance import make_data

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def conformance_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy shards and their processor, made once."""
    return make_data(tmp_path_factory.mktemp("conformance"))
