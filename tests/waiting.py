"""Waiting for what another process or thread does, however busy the machine is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 240.0


def wait_for(is_so: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Wait until something is so: no test is about time, and machines are busy."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
