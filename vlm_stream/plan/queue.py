"""Units that are planned and not yet assigned, and the cursor: where in the unit stream the next one is found.

Enters: windows, one after the other. Leaves: the next n units as one table. Units after the cursor may already be
delivered, by a step of another shape.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.plan.values import BalanceConfig, Dropped, Ints, StepShape

if TYPE_CHECKING:
    from vlm_stream.plan.window import Terms, Window, WindowStart

Flags = npt.NDArray[np.bool_]

logger = logging.getLogger(__name__)

_MAX_EMPTY = 1000  # windows without a unit, in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What has been delivered since the start of the run."""

    steps: int = 0  # finished steps
    units: int = 0
    samples: int = 0
    digest: str = ""  # rolling digest of everything delivered, micro-step by micro-step, over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """How far the steps after a cursor were delivered, and how they were assigned: enough to assign them again."""

    shape: StepShape
    balance: BalanceConfig
    steps_done: int
    micro_done: int  # micro-steps of the step after `steps_done`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cursor:
    """Where the plan stands."""

    window: WindowStart
    """Start of the first window that has units left."""
    done: Flags
    """Which units from there on are delivered, up to the last delivered one."""
    window_digest: str | None
    """Digest of that window; None: not planned yet."""
    planned: int
    """Number of the first window of which no unit was ever assigned: from here on the mixture may change its terms,
    and dropped samples are still to be told."""
    terms: tuple[Terms, ...]
    """Of the mixture, now and until the last window planned."""
    delivered: Delivered
    begun: Begun | None = None
    """Not None: inside of steps that were assigned together."""

    def terms_at(self, number: int) -> Terms:
        return [terms for terms in self.terms if terms.first_window <= number][-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitTable:
    """n units from one or several windows."""

    windows: tuple[Window, ...]
    window: Ints  # [n] Which of `windows`
    unit: Ints  # [n] Number within its window
    tokens: Ints
    llm: Ints
    vit: Ints
    decode: Ints
    labels: Ints  # [n] Below 0: unknown
    hashes: npt.NDArray[np.uint64]
    num_samples: Ints  # [n] Samples in each unit
    dropped: tuple[Dropped, ...]  # of the windows that were planned for these units

    def __len__(self) -> int:
        return len(self.unit)


class UnitQueue:
    """The unit stream from a cursor on, taken in any portions."""

    def __init__(self, start: Cursor, plan: Callable[[WindowStart], Window | None]) -> None:
        """Start at the window of a cursor; `plan` gives the window that begins at one."""
        self._start = start
        self._plan = plan
        self._reported = start.planned
        self._next = start.window
        self._ended = False
        self._num_empty = 0
        self.left_out: tuple[Dropped, ...] = ()
        """What the stream ends without: no step is left that could tell it."""
        self._windows: deque[tuple[Window, Ints]] = deque()
        """Planned windows, and the numbers of their units that are left, ascending."""

    def cursor(self) -> Cursor:
        """Return where the stream stands; what was delivered is left as it was at the start."""
        first = self._windows[0][0] if self._windows else None
        return Cursor(
            window=first.start if first else self._next,
            done=self._done(),
            window_digest=first.digest if first else None,
            # a step of another shape may have reached farther than this queue has.
            planned=max(self._next.number, self._reported),
            terms=self._start.terms,
            delivered=self._start.delivered,
        )

    def peek(self) -> Window | None:
        """Return the window of the next unit without taking anything."""
        return self._windows[0][0] if self._windows or self._pull() else None

    def discard(self, done: Flags) -> None:
        """Take out units that were delivered before: `done[k]` stands for the k-th unit from here on.

        Raises:
            StateError: There are no such units: the first window has none left, or the stream has ended, or windows
                were not planned so far.
        """
        begin = 0
        first = self.peek() if len(done) else None
        if first is not None and done[: first.num_units].all() and len(done) >= first.num_units:
            raise StateError(_no_such_units(len(done), first.start.number))
        kept: deque[tuple[Window, Ints]] = deque()
        while begin < len(done):
            if (not self._windows and not self._pull()) or self._windows[0][0].start.number >= self._start.planned:
                raise StateError(_no_such_units(len(done), self._start.window.number))
            window, left = self._windows.popleft()
            keep = np.ones(len(left), dtype=bool)
            flags = done[begin : begin + len(left)]
            keep[: len(flags)] = ~flags
            begin += len(left)
            kept.append((window, left[keep]))
        self._windows.extendleft(reversed(kept))
        self._drop_finished()

    def remove(self, delivered: Mapping[int, Ints]) -> None:
        """Take out units by the numbers of their windows and their own."""
        while self._next.number <= max(delivered, default=-1) and self._pull():
            pass
        for place, (window, left) in enumerate(self._windows):
            keep = np.ones(window.num_units, dtype=bool)
            keep[delivered.get(window.start.number, [])] = False
            self._windows[place] = (window, left[keep[left]])
        self._drop_finished()

    def take(self, count: int) -> UnitTable | None:
        """Take the next `count` units; fewer where the stream ends, None when nothing is left."""
        parts: list[tuple[Window, Ints]] = []
        while count > 0:
            self._drop_finished()
            if not self._windows and not self._pull():
                break
            window, left = self._windows.popleft()
            parts.append((window, left[:count]))
            self._windows.appendleft((window, left[count:]))
            count -= len(parts[-1][1])
        self._drop_finished()
        if not any(len(units) for _, units in parts):
            self.left_out += tuple(note for window, _ in parts for note in window.dropped)
            _tell_left_out(self.left_out)
            return None
        dropped: tuple[Dropped, ...] = ()
        for window, _ in parts:
            if window.start.number >= self._reported:
                self._reported = window.after.number
                dropped += window.dropped
        return _table([(window, units) for window, units in parts if len(units)], dropped)

    def _done(self) -> Flags:
        """Return which units of the planned windows are delivered, up to the last delivered one."""
        flags = np.ones(sum(window.num_units for window, _ in self._windows), dtype=bool)
        begin = 0
        for window, left in self._windows:
            flags[begin + left] = False
            begin += window.num_units
        return flags[: int(np.flatnonzero(flags)[-1]) + 1] if flags.any() else flags[:0]

    def _pull(self) -> bool:
        window = None if self._ended else self._plan(self._next)
        if window is None:
            self._ended = True
            return False
        self._next = window.after
        self._num_empty = 0 if window.num_units else self._num_empty + 1
        if self._num_empty > _MAX_EMPTY:
            raise ConfigError(
                f"{self._num_empty} windows in a row hold no sample that fits ({len(window.dropped)} dropped in the "
                f"last one); the stream would search for ever. Raise pack_size, vision_size or max_tokens."
            )
        self._windows.append((window, np.arange(window.num_units, dtype=np.int64)))
        return True

    def _drop_finished(self) -> None:
        while self._windows and not len(self._windows[0][1]):
            self._windows.popleft()


def _no_such_units(count: int, window: int) -> str:
    return (
        f"The state names {count} units of window {window} and those behind it as delivered, and the plan has no such "
        f"units there, so its place in the stream is unknown. Use an older checkpoint, or start without a state."
    )


def _table(parts: list[tuple[Window, Ints]], dropped: tuple[Dropped, ...]) -> UnitTable:
    def join(columns: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    return UnitTable(
        windows=tuple(window for window, _ in parts),
        window=join([np.full(len(units), place) for place, (_, units) in enumerate(parts)]),
        unit=join([units for _, units in parts]),
        num_samples=join([window.splits[units + 1] - window.splits[units] for window, units in parts]),
        dropped=dropped,
        **{
            name: join([getattr(window, name)[units] for window, units in parts])
            for name in ("tokens", "llm", "vit", "decode", "labels", "hashes")
        },
    )


def _tell_left_out(notes: Sequence[Dropped]) -> None:
    """Tell in one line what the stream ends without: no step is left in whose ledger it could stand."""
    if notes:
        reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(note.reason for note in notes).items())
        longest = max(notes, key=lambda note: note.tokens)
        logger.warning(
            "%d samples are left out at the end of the stream (%s): the longest is %s with %d tokens; raise pack_size "
            "or max_length to train on them",
            len(notes),
            reasons,
            longest.ref,
            longest.tokens,
        )
