"""Which sample a process is working on, in a few numbers that outlive it.

A decoder can end its process: by a crash, by memory, by never coming back. A builder notes each sample before it
begins, in memory that it shares with its parent and that has no lock. When the process is gone, the parent reads the
note.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.dispatch.pool import Noted

if TYPE_CHECKING:
    from vlm_stream.blueprint import SampleRef

__all__ = ["SampleNote"]

_IDLE: Final = -1


class SampleNote:
    """What one process is working on; it may be sent to a process that is started with it."""

    def __init__(self, context: Any) -> None:
        """Share four numbers: when the sample was begun, and its ref."""
        self._numbers = context.RawArray("q", [_IDLE, 0, 0, 0])

    def begin(self, ref: SampleRef) -> None:
        """Write down a sample; when it was begun comes last, so that nobody reads half of a ref."""
        self.end()
        self._numbers[1:4] = ref
        self._numbers[0] = time.monotonic_ns()

    def end(self) -> None:
        """Write down that no sample is worked on."""
        self._numbers[0] = _IDLE

    def read(self) -> Noted | None:
        """Return the sample that is, or was, worked on."""
        begun, source, shard, row = self._numbers[:]
        return None if begun == _IDLE else Noted((source, shard, row), (time.monotonic_ns() - begun) / 1e9)
