"""The encoded samples of the packing tests, for pipelines."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPEC = importlib.util.spec_from_file_location("encoded_samples", Path(__file__).parents[1] / "collate" / "conftest.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_SAMPLES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_SAMPLES)


@pytest.fixture(scope="session")
def encoded() -> dict[str, dict[str, Any]]:
    """Return Qwen2.5-VL samples by kind."""
    samples: dict[str, dict[str, Any]] = _SAMPLES.kinds_of("qwen2_5_vl")
    return samples


@pytest.fixture(scope="session")
def net() -> Any:
    return _SAMPLES.model_of("qwen2_5_vl", "sdpa")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models are fastest on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
