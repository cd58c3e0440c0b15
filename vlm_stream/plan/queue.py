"""Units that are planned and not yet dealt.

Enters: windows, one after the other. Leaves: the next n units as one table, and `Place`: everything that says where
in the unit stream the next unit is found, including units behind it that were delivered early, by a step of another
shape.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from vlm_stream.plan.values import Dropped
    from vlm_stream.plan.window import Cursor, Window

    Ints = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

_MAX_EMPTY = 1000  # windows without a unit, in a row

__all__ = ["Place", "UnitQueue", "UnitTable"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Where the stream stands: the windows that still have units, and which of their units are left."""

    cursor: Cursor
    """Start of the first of those windows; of the next window when there are none."""
    windows: tuple[Window, ...]
    left: tuple[Ints, ...]
    """Per window the numbers of its units that are still to come, ascending."""
    planned: int
    """Number of the first window of which no unit was ever dealt: from here on the mixture may change its terms."""

    def done(self) -> npt.NDArray[np.bool_]:
        """Return which units from the cursor on are delivered, up to the last delivered one."""
        flags = [np.ones(window.num_units, dtype=bool) for window in self.windows]
        for flag, left in zip(flags, self.left, strict=True):
            flag[left] = False
        joined = np.concatenate(flags) if flags else np.zeros(0, dtype=bool)
        return joined[: int(np.flatnonzero(joined)[-1]) + 1] if joined.any() else joined[:0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitTable:
    """n units from one or several windows."""

    windows: tuple[Window, ...]
    window: Ints
    """[n] Place in `windows`."""
    unit: Ints
    """[n] Number within its window."""
    tokens: Ints
    llm: Ints
    vit: Ints
    labels: Ints
    """[n] Below 0: unknown."""
    hashes: npt.NDArray[np.uint64]
    num_samples: Ints
    """[n] Samples in each unit."""
    dropped: tuple[Dropped, ...]
    """Of the windows that were planned for these units."""

    def __len__(self) -> int:
        """Return n."""
        return len(self.unit)


class UnitQueue:
    """The unit stream from a cursor on, taken in any portions."""

    def __init__(self, cursor: Cursor, plan: Callable[[Cursor], Window | None], reported: int = 0) -> None:
        """Start at a cursor; `plan` gives the window that begins at one.

        Windows before number `reported` were planned before a resume: what they dropped is not told again.
        """
        self._plan = plan
        self._reported = reported
        self._next = cursor
        self._ended = False
        self._num_empty = 0
        self._windows: deque[tuple[Window, Ints]] = deque()

    def place(self) -> Place:
        """Return where the stream stands."""
        windows = tuple(window for window, _ in self._windows)
        cursor = windows[0].start if windows else self._next
        left = tuple(left for _, left in self._windows)
        # A step of another shape may have reached farther than this queue has.
        return Place(cursor=cursor, windows=windows, left=left, planned=max(self._next.window, self._reported))

    def peek(self) -> Window | None:
        """Return the window of the next unit without taking anything."""
        return self._windows[0][0] if self._windows or self._pull() else None

    def num_at_hand(self) -> int:
        """Return how many units are left of the window of the next unit; 0: that is still to be planned."""
        return len(self._windows[0][1]) if self._windows else 0

    def discard(self, done: npt.NDArray[np.bool_]) -> None:
        """Take out units that were delivered before: `done[k]` stands for the k-th unit from here on."""
        begin = 0
        kept: deque[tuple[Window, Ints]] = deque()
        while begin < len(done):
            if not self._windows and not self._pull():
                break
            window, left = self._windows.popleft()
            flags = done[begin : begin + len(left)]
            begin += len(left)
            keep = np.ones(len(left), dtype=bool)
            keep[: len(flags)] = ~flags
            kept.append((window, left[keep]))
        self._windows.extendleft(reversed(kept))
        self._drop_finished()

    def take(self, count: int) -> UnitTable | None:
        """Take the next `count` units; fewer where an epoch is closed or the stream ends, None when nothing is left."""
        parts: list[tuple[Window, Ints]] = []
        while count > 0:
            self._drop_finished()
            if not self._windows and not self._pull():
                break
            window, left = self._windows.popleft()
            parts.append((window, left[:count]))
            self._windows.appendleft((window, left[count:]))
            count -= len(parts[-1][1])
            if window.closes and not len(self._windows[0][1]) and any(len(units) for _, units in parts):
                break
        self._drop_finished()
        if not any(len(units) for _, units in parts):
            for note in (note for window, _ in parts for note in window.dropped):
                logger.warning(
                    "%s is left out at the end of the stream: %s (%d tokens)", note.ref, note.reason, note.tokens
                )
            return None
        dropped: tuple[Dropped, ...] = ()
        for window, _ in parts:
            if window.start.window >= self._reported:
                self._reported = window.after.window
                dropped += window.dropped
        return _table([(window, units) for window, units in parts if len(units)], dropped)

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


def _table(parts: list[tuple[Window, Ints]], dropped: tuple[Dropped, ...]) -> UnitTable:
    if len(parts) == 1:  # almost always, and there are as many tables as steps
        ((window, units),) = parts
        return _part(window, units, 0, dropped)
    tables = [_part(window, units, place, ()) for place, (window, units) in enumerate(parts)]

    def join(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(table, name) for table in tables])

    return UnitTable(
        windows=tuple(window for window, _ in parts),
        dropped=dropped,
        **{name: join(name) for name in ("window", "unit", "tokens", "llm", "vit", "labels", "hashes", "num_samples")},
    )


def _part(window: Window, units: Ints, place: int, dropped: tuple[Dropped, ...]) -> UnitTable:
    return UnitTable(
        windows=(window,),
        window=np.full(len(units), place),
        unit=units,
        tokens=window.tokens[units],
        llm=window.llm[units],
        vit=window.vit[units],
        labels=window.labels[units],
        hashes=window.hashes[units],
        num_samples=window.splits[units + 1] - window.splits[units],
        dropped=dropped,
    )
