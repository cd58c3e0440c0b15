"""Builders of one kind: what a dispatcher asks of them, and what they report.

A pool starts builders, hands them blueprints and reports what becomes of them, as events, from threads of its own. It
decides nothing: what is given to whom, and what happens after a loss, is the dispatcher's. `processes.py` and
`ray_pool.py` are two; `shared.py` stands before one of them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from vlm_stream.errors import StorageError, VlmStreamError, WorkerError, say_no_descriptors

if TYPE_CHECKING:
    from vlm_stream.blueprint import Blueprint, SampleRef
    from vlm_stream.build import Delivery

PEER: Final = -1
"""Stands for the builder of a batch that came from another loader."""
Kind: TypeAlias = Literal["usual", "reserve", "guest"]
"""Builders that were asked for; those that take over when these are late; those that come and go by themselves."""


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

    def to_error(self) -> BaseException:
        """Return what the trainer raises."""
        if self.error is None:
            if os.strerror(errno.EMFILE) in self.text:  # a library has panicked over it
                return StorageError(say_no_descriptors("a batch could not be made"))
            return WorkerError(
                f"a worker failed, so the run ends here; its state is good. The worker's traceback:\n{self.text}"
            )
        if not isinstance(self.error, VlmStreamError):
            self.error.add_note(f"in a worker process:\n{self.text}")
        return self.error


class Joined(NamedTuple):
    """A builder is ready."""

    builder: int
    kind: Kind = "usual"
    place: str = "localhost"
    """The machine."""


class Finished(NamedTuple):
    """A builder has built a batch, or failed to; without a number it failed before its first."""

    builder: int
    number: int | None
    result: Delivery | Failure
    resident_bytes: int
    """Memory of the builder's process."""
    parcel: Any = None
    """How others can get the same result, where the pool has a way."""


class Lost(NamedTuple):
    """A builder is gone."""

    builder: int
    how: str
    """For people: "died (SIGKILL)"."""
    exit_code: int | None
    """None: it was ended because it hung."""
    noted: Noted | None
    """What it was working on."""
    kind: Kind = "usual"
    is_remote: bool = False
    """It was elsewhere, where machines come and go and nobody can see what it was working on."""


class Lent(NamedTuple):
    """A batch that was given to a builder is being built by another loader already; it will come from there."""

    builder: int
    number: int


class Unlent(NamedTuple):
    """It will not."""

    number: int


Event: TypeAlias = Joined | Finished | Lost | Lent | Unlent
Listener: TypeAlias = Callable[[Event], None]


class Pool(Protocol):
    """Builders that can be given work. No method waits."""

    nearness: Callable[[int, Blueprint], float] | None
    """Returns the share of a batch's bytes that lie nearer to a builder than to others; None: that is all the same."""

    def grow(self, *, is_reserve: bool = False) -> int:
        """Start one more builder; return its number. `Joined` follows, or `Lost`."""

    def give(self, builder: int, number: int, blueprint: Blueprint, skipped: Mapping[SampleRef, str]) -> None:
        """Let a builder build a batch after those that it has; `Finished` follows. `skipped` samples are left out.

        A batch that another loader builds may be taken from there (`Lent`); given again, it is built here.
        """

    def drop(self, builder: int, number: int) -> None:
        """Let a builder forget a batch that it has not begun."""

    def stop(self, builder: int, why: str = "") -> None:
        """End a builder, also one that is still being started. With a reason, as one that hangs: `Lost` follows."""

    def suspended(self) -> list[int]:
        """Return builders whose processes were told to stop (SIGSTOP), where that can be seen; they may go on again."""

    def pids(self) -> list[int]:
        """Return the process ids of the builders, where they have any here."""

    def close(self) -> None:
        """End all builders, and wait for it."""
