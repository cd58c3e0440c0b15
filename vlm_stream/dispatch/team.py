"""The builders of a dispatcher: those that there are, those that are being started, and how many there should be.

Enters: a pool, and what it reports of builders. Leaves: calls of `grow` and `stop`, and what each builder has done. The
dispatcher's lock is held by whoever asks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlm_stream.dispatch.pool import Failure

if TYPE_CHECKING:
    from vlm_stream.build import Delivery
    from vlm_stream.dispatch.pool import Joined, Kind, Lost, Pool
    from vlm_stream.dispatch.schedule import Schedule


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
        """Return how many results it has given."""
        return self.num_built + self.num_failed

    def count(self, result: Delivery | Failure) -> None:
        """Add a result."""
        if isinstance(result, Failure):
            self.num_failed += 1
            return
        self.num_built += 1
        self.num_bytes += result.num_bytes
        self.seconds += sum(result.seconds.values())

    def row(self) -> dict[str, Any]:
        """Return what it has done so far."""
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
        """Start so many builders of each kind; the usual ones are processes of this machine, or they are elsewhere."""
        self._pool, self._schedule, self._are_remote = pool, schedule, are_remote
        self._wanted: dict[Kind, int] = {"usual": num_usual, "reserve": num_reserves}
        self._starting: dict[int, Kind] = {}
        self.started_at: dict[int, float] = {}
        """When each process of this machine was begun that is being started. Those elsewhere may wait for room."""
        self._unwanted: set[int] = set()
        """Those that were being started when fewer were wanted."""
        self.active: dict[int, ActiveBuilder] = {}
        self.most = 0
        """The most that there were at a time."""
        self.fill()

    @property
    def num_starting(self) -> int:
        """Return how many are being started."""
        return len(self._starting)

    @property
    def num_usual(self) -> int:
        """Return how many there are beside the reserve, or will be."""
        return len(self._numbers("usual")) + sum(kind == "usual" for kind in self._starting.values())

    def rows(self) -> list[dict[str, Any]]:
        """Return what each builder has done so far."""
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
        """Take in one that is ready."""
        self._starting.pop(event.builder, None)
        self.started_at.pop(event.builder, None)
        self.active[event.builder] = ActiveBuilder(event.kind, event.place)
        self.most = max(self.most, len(self.active))
        self._schedule.add_builder(event.builder, is_reserve=event.kind == "reserve")
        if event.builder in self._unwanted:
            self.retire(event.builder)

    def lose(self, event: Lost) -> bool:
        """Forget one that is gone; tell whether it was wanted."""
        was_starting = self._starting.pop(event.builder, None) is not None
        self.started_at.pop(event.builder, None)
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
        """Start those that are missing."""
        for kind, wanted in self._wanted.items():
            num_starting = sum(each == kind for each in self._starting.values())
            for _ in range(wanted - len(self._numbers(kind)) - num_starting):
                number = self._pool.grow(is_reserve=kind == "reserve")
                self._starting[number] = kind
                if kind == "reserve" or not self._are_remote:
                    self.started_at[number] = time.monotonic()

    def _trim(self) -> None:
        """Let those go that are too many, first what is being started: the cluster may have no room for it."""
        for kind, wanted in self._wanted.items():
            starting = [number for number, each in self._starting.items() if each == kind]
            active = self._numbers(kind)
            for number in starting[max(wanted - len(active), 0) :]:
                del self._starting[number]
                self.started_at.pop(number, None)
                self._unwanted.add(number)
                self._pool.stop(number)
            for number in active[wanted:]:
                self.retire(number)

    def _numbers(self, kind: Kind) -> list[int]:
        return [n for n, builder in self.active.items() if builder.kind == kind and not builder.is_retiring]
