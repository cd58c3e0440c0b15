"""The builders of a dispatcher: who there is, how many there should be, and which samples cost some of them.

Enters: a pool, and what it reports of builders. Leaves: calls of `grow` and `stop`, what each builder has done, and
samples to be left out. The dispatcher's lock is held by whoever asks.
"""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.dispatch.pool import Failure
from vlm_stream.lifetimes import say_exit

if TYPE_CHECKING:
    from vlm_stream.blueprint import Blueprint, SampleRef
    from vlm_stream.build import Delivery
    from vlm_stream.dispatch.pool import Joined, Kind, Lost, Pool
    from vlm_stream.dispatch.schedule import Schedule

_PERIOD_S: Final = 5.0
_MIN_BATCHES: Final = 4
_WAITING: Final = 0.05
"""A trainer that waits for a larger share of its time wants more builders."""
_PILE: Final = (4, 8)
"""So many batches ready for each builder, and so many more, are a pile: one builder fewer would do."""
_QUIET_PERIODS: Final = 6
"""Without any waiting and with builders to spare, before one of these is let go: starting it again takes seconds."""
_OWN_LOSSES: Final = 2
_FOREIGN_LOSSES: Final = 3
_FOREIGN_SIGNALS: Final = frozenset((signal.SIGKILL, signal.SIGTERM))
"""Sent by the system or by people, who do not mean the sample; but memory that a sample takes is a cause, too."""
_SUSPICIOUS: Final = 2
"""Builders elsewhere that were lost over one batch, before it is built where the sample will be known."""


@dataclass(slots=True)
class ActiveBuilder:
    """What the dispatcher knows of a builder."""

    kind: Kind
    node: str
    num_built: int = 0
    num_failed: int = 0
    num_hedged: int = 0
    """Batches that were given to a second builder because this one was late."""
    num_bytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    """For how long the trainer waited for batches that it built."""
    settled_bytes: int = 0
    is_retiring: bool = False

    @property
    def num_finished(self) -> int:
        return self.num_built + self.num_failed

    def count(self, result: Delivery | Failure) -> None:
        if isinstance(result, Failure):
            self.num_failed += 1
            return
        self.num_built += 1
        self.num_bytes += result.num_bytes
        self.seconds += sum(result.seconds.values())

    def row(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "node": self.node,
            "built": self.num_built,
            "failed": self.num_failed,
            "hedged": self.num_hedged,
            "waited_s": self.waited_s,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
        }


class Team:
    """Who builds."""

    def __init__(
        self, pool: Pool, schedule: Schedule, num_usual: int, num_reserves: int, *, are_remote: bool = False
    ) -> None:
        """Start so many builders of each kind; the usual ones may be elsewhere."""
        self._pool, self._schedule, self._are_remote = pool, schedule, are_remote
        self._wanted: dict[Kind, int] = {"usual": num_usual, "reserve": num_reserves}
        self.starting: dict[int, tuple[Kind, float]] = {}
        """When each process of this machine was begun; inf: it is elsewhere, and may wait for room."""
        self._unwanted: set[int] = set()
        """Those that were being started when fewer were wanted."""
        self.active: dict[int, ActiveBuilder] = {}
        self.most = 0
        """The most that there were at a time."""
        self.fill()

    @property
    def num_usual(self) -> int:
        """Return how many there are beside the reserve, or will be."""
        return len(self._numbers("usual")) + sum(kind == "usual" for kind, _ in self.starting.values())

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"builder": number, **builder.row(), "queued": len(self._schedule.queued(number))}
            for number, builder in self.active.items()
        ]

    def want(self, num_usual: int) -> None:
        """Have another number of builders, beside the reserve."""
        if num_usual != self._wanted["usual"]:
            self._wanted["usual"] = num_usual
            self._trim()
            self.fill()

    def join(self, event: Joined) -> None:
        self.starting.pop(event.builder, None)
        self.active[event.builder] = ActiveBuilder(event.kind, event.place)
        self.most = max(self.most, len(self.active))
        self._schedule.add_builder(event.builder, is_reserve=event.kind == "reserve")
        if event.builder in self._unwanted:
            self.retire(event.builder)

    def lose(self, event: Lost) -> bool:
        """Tell whether one that is gone was wanted."""
        was_starting = self.starting.pop(event.builder, None) is not None
        builder = self.active.pop(event.builder, None)
        self._schedule.remove_builder(event.builder)
        if event.builder in self._unwanted:
            self._unwanted.remove(event.builder)
            return False
        return was_starting or (builder is not None and not builder.is_retiring)

    def retire(self, number: int) -> None:
        """Give it no more, and end it when it has nothing left."""
        self.active[number].is_retiring = True
        self._schedule.retire_builder(number)
        self.end_if_idle(number)

    def end_if_idle(self, number: int) -> None:
        """End it, if it has nothing left."""
        if not self._schedule.queued(number):
            self._pool.stop(number)

    def fill(self) -> None:
        for kind, wanted in self._wanted.items():
            num_starting = sum(each == kind for each, _ in self.starting.values())
            for _ in range(wanted - len(self._numbers(kind)) - num_starting):
                number = self._pool.grow(is_reserve=kind == "reserve")
                is_here = kind == "reserve" or not self._are_remote
                self.starting[number] = kind, time.monotonic() if is_here else math.inf

    def _trim(self) -> None:
        """Let those go that are too many, first what is being started: the cluster may have no room for it."""
        for kind, wanted in self._wanted.items():
            starting = [number for number, (each, _) in self.starting.items() if each == kind]
            active = self._numbers(kind)
            for number in starting[max(wanted - len(active), 0) :]:
                del self.starting[number]
                self._unwanted.add(number)
                self._pool.stop(number)
            for number in active[wanted:]:
                self.retire(number)

    def _numbers(self, kind: Kind) -> list[int]:
        return [n for n, builder in self.active.items() if builder.kind == kind and not builder.is_retiring]


class Scaler:
    """How many builders a trainer needs: more when it waits, fewer when batches pile up or builders are idle.

    It has no clock and no threads.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._begin: float | None = None
        self._num_batches = self._num_quiet = 0
        self._waited_s = 0.0
        self._num_idle = most

    def saw(self, now: float, waited_s: float, num_idle: int, num_builders: int, num_ready: int = 0) -> int:
        """Take in a batch that was taken, and for how long it was waited for; return how many builders there should be.

        `num_builders` are those that there are, those that are being started included.
        """
        if num_ready > _PILE[0] * num_builders + _PILE[1]:
            num_idle = max(num_idle, 1)
        num_builders = min(max(num_builders, self._least), self._most)
        if self._begin is None:  # what the first batch waited for is the start of the builders
            self._begin = now
            return num_builders
        self._num_batches += 1
        self._waited_s += waited_s
        self._num_idle = min(self._num_idle, num_idle)
        passed = now - self._begin
        if passed < _PERIOD_S or self._num_batches < _MIN_BATCHES:
            return num_builders
        share, idle = self._waited_s / passed, self._num_idle
        self._begin, self._num_batches, self._waited_s, self._num_idle = now, 0, 0.0, self._most
        if share > _WAITING and not idle:
            self._num_quiet = 0
            return min(num_builders + max(1, num_builders // 4), self._most)
        self._num_quiet = self._num_quiet + 1 if idle and share < _WAITING / 10 else 0
        if self._num_quiet < _QUIET_PERIODS:
            return num_builders
        self._num_quiet = 0
        return max(num_builders - max(1, idle // 2), self._least)


class Losses:
    """How many builders each sample has cost, and which samples are left out from now on.

    A sample that ends its process would do so for ever. Losses are counted for the sample that was worked on; after the
    second one (the third, if a signal came that may have been sent from outside, or may have stopped the process) the
    sample is left out.
    """

    def __init__(self) -> None:
        self._counts: Counter[SampleRef] = Counter()
        self._by_batch: Counter[int] = Counter()
        self._skipped: dict[SampleRef, str] = {}
        """What the ledger says of each."""
        self.num_settled = 0
        """Losses that cannot come again, since their samples are left out."""

    def among(self, blueprint: Blueprint) -> dict[SampleRef, str]:
        """Return those of a blueprint's samples that are left out."""
        if not self._skipped:
            return {}
        refs = (piece.ref for row in blueprint.rows for piece in row)
        return {ref: self._skipped[ref] for ref in refs if ref in self._skipped}

    def add(self, ref: SampleRef, exit_code: int | None, *, is_doubted: bool = False) -> bool:
        """Count one; tell whether the sample is left out now.

        Without an exit code the builder had hung; that is doubted where nobody has said how long it may take.
        """
        if ref in self._skipped:  # it was given before; it counts as a restart, so that this has an end
            return True
        self._counts[ref] += 1
        num_losses = self._counts[ref]
        may_be_foreign = is_doubted if exit_code is None else -exit_code in _FOREIGN_SIGNALS
        if num_losses < (_FOREIGN_LOSSES if may_be_foreign else _OWN_LOSSES):
            return False
        how = "hung" if exit_code is None else f"died ({say_exit(exit_code)})"
        self._skipped[ref] = (
            f"{num_losses} workers were lost while they worked on it (the last one {how}), so it is left out. Decode "
            f"it by itself to see why, and leave it out of the data or write its media again."
        )
        self.num_settled += num_losses
        return True

    def add_batch(self, number: int) -> bool:
        """Count a builder elsewhere, of which nobody knows the sample; tell whether its batch is suspicious now."""
        self._by_batch[number] += 1
        return self._by_batch[number] >= _SUSPICIOUS
