"""Builders of one kind: what a dispatcher asks of them, and what they report.

A pool starts builders, hands them blueprints and reports what becomes of them, as events, from threads of its own. It
decides nothing: what is given to whom, and what happens after a loss, is the dispatcher's. `processes.py` is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from vlm_stream.blueprint import Blueprint, SampleRef
    from vlm_stream.build import Delivery

__all__ = ["Event", "Failure", "Finished", "Joined", "Listener", "Lost", "Noted", "Pool"]


class Noted(NamedTuple):
    """A sample that was begun and not finished."""

    ref: SampleRef
    seconds: float
    """Since it was begun."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a builder, with its traceback as text."""

    error: BaseException | None
    """None: it cannot leave its process."""
    text: str


class Joined(NamedTuple):
    """A builder is ready."""

    builder: int


class Finished(NamedTuple):
    """A builder has built a batch, or failed to; without a number it failed before its first."""

    builder: int
    number: int | None
    result: Delivery | Failure
    resident_bytes: int
    """Memory of the builder's process."""


class Lost(NamedTuple):
    """A builder is gone."""

    builder: int
    how: str
    """For people: "died (SIGKILL)"."""
    exit_code: int | None
    """None: it was ended because it hung."""
    noted: Noted | None
    """What it was working on."""


Event: TypeAlias = Joined | Finished | Lost
Listener: TypeAlias = Callable[[Event], None]


class Pool(Protocol):
    """Builders that can be given work. No method waits."""

    def grow(self) -> int:
        """Start one more builder; return its number. `Joined` follows, or `Lost`."""

    def give(self, builder: int, number: int, blueprint: Blueprint, skipped: Mapping[SampleRef, str]) -> None:
        """Let a builder build a batch after those that it has; `Finished` follows. `skipped` samples are left out."""

    def drop(self, builder: int, number: int) -> None:
        """Let a builder forget a batch that it has not begun."""

    def stop(self, builder: int, why: str = "") -> None:
        """End a builder. With a reason, as one that hangs: `Lost` follows."""

    def pids(self) -> list[int]:
        """Return the process ids of the builders, where they have any here."""

    def close(self) -> None:
        """End all builders, and wait for it."""
