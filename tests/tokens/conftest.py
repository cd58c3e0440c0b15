"""One thread for torch: the tensors here are small, and threads of several test runs would fight for the cores."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
