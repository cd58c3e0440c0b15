"""Which sample a worker is working on, told by a few numbers that outlive the worker.

A decoder can end its process: by a crash, by memory, by never coming back. Whoever builds samples notes each before it
begins, in memory that it shares with its parent and that has no lock. When the process is gone, the parent reads the
note, counts, and gives the next worker the samples that it shall leave out. In a process that nobody watches nothing
is noted.

    builder   begin_sample(ref) ... end_sample()      reason_to_skip(ref)
    parent    SampleNote(context) -> its worker       note.read() behind the worker's death
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Noted", "SampleNote", "SampleRef", "begin_sample", "end_sample", "reason_to_skip", "watch_samples"]

SampleRef: TypeAlias = tuple[int, int, int]
"""Source, shard and row."""
_IDLE: Final = -1


class Noted(NamedTuple):
    """A sample that was begun and not finished."""

    ref: SampleRef
    seconds: float
    """Since it was begun."""


class SampleNote:
    """What one worker is working on; it may be sent to a process that is started with it."""

    def __init__(self, context: Any) -> None:
        """Share four numbers: when the sample was begun, and what it is called."""
        self._numbers = context.RawArray("q", [_IDLE, 0, 0, 0])

    def begin(self, ref: SampleRef) -> None:
        """Write down a sample; when it was begun comes last, so that nobody reads half of a name."""
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


_note: SampleNote | None = None
_skipped: Mapping[SampleRef, str] = {}


def watch_samples(note: SampleNote, skipped: Mapping[SampleRef, str]) -> None:
    """Let this process note its samples, and leave out those that ended others, each with what is said of it."""
    global _note, _skipped
    _note, _skipped = note, skipped


def begin_sample(ref: SampleRef) -> None:
    """Note that a sample is worked on, if anybody watches."""
    if _note is not None:
        _note.begin(ref)


def end_sample() -> None:
    """Note that it is done."""
    if _note is not None:
        _note.end()


def reason_to_skip(ref: SampleRef) -> str | None:
    """Return what is said of a sample that is to be left out; None for all others."""
    return _skipped.get(ref)
