"""Any step of one plan, found by planning ahead.

Enters: a plan, the shape of a step, maybe a state. Leaves: `Step`s. Cursors are noted on the way and by a thread in the
background, so that a step far ahead, or one before the last, does not cost the way from the start.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import InputError
from vlm_stream.plan import read_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.plan import Step, StepShape
    from vlm_stream.planning import Plan

_KEPT_STEPS: Final = 128
_NOTED: Final = 16
"""Horizons between two cursors that are noted."""
_MAX_NOTES: Final = 2048
_NEAR: Final = 1024
"""Steps that are planned ahead while a page waits."""
_WALK_SECONDS: Final = 120.0
"""How long a plan is walked through in the background; endless ones never end."""
_FOLLOWED: Final = 256
"""Steps after which the state of a running loader is noted."""
_MAX_REST: Final = 1.0
"""Seconds."""


class Walk:
    """Finds steps of one plan; may be used by several threads."""

    def __init__(self, plan: Plan, shape: StepShape, state: dict[str, Any] | None, *, share: float = 1.0) -> None:
        """Begin at the start or at a state; `share` of a core is what the background thread takes."""
        self.plan, self.shape, self._state, self._share = plan, shape, state, share
        self.first = 0 if state is None else read_state(state).delivered.steps
        """The first step that can be found."""
        self.total: int | None = None
        """Steps from the start of the run, once all were walked through."""
        self._planner = plan.after(0).planner
        self._notes: dict[int, Any] = {}
        self._kept: OrderedDict[int, Step] = OrderedDict()
        self._steps: Iterator[Step] | None = None
        self._at, self._target = 0, 0
        self._lock, self._notes_lock = threading.Lock(), threading.Lock()
        self._walker: threading.Thread | None = None

    def step(self, number: int) -> Step:
        """Return one step.

        Raises:
            InputError: The run ends before it, or the state stands after it.
        """
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
            if number < self.first or (self.total is not None and number >= self.total):
                raise self._absent(number)
            if self._steps is None or self._at > number:
                self._restart(number)
            self._target = number
            steps: Any = self._steps
            for found in steps:
                self._at = found.index + 1
                self._kept[found.index] = found
                if len(self._kept) > _KEPT_STEPS:
                    self._kept.popitem(last=False)
                if found.index >= number:
                    break
            if number not in self._kept:
                self._steps = None
                raise self._absent(number)
            return self._kept[number]

    def _absent(self, number: int) -> InputError:
        end = "" if self.total is None else f"; it has the steps {self.first} to {self.total - 1}"
        return InputError(f"there is no step {number} in this plan{end}: ask for another one, or change the plan")

    def _restart(self, number: int) -> None:
        cursor, first = self._nearest(number)
        state = self._state
        if isinstance(cursor, dict):
            state = cursor
        elif cursor is not None:
            state = self._planner.encode(replace(cursor, delivered=replace(cursor.delivered, steps=first)))
        self._at = first

        def wanted(first: int, horizon: Any) -> bool:
            return bool(first + horizon.num_steps > self._target)

        self._steps = self._planner.search(self.shape, state, wanted)

    def _nearest(self, number: int) -> tuple[Any, int]:
        """Return the last cursor that was noted before a step, and the step that it stands at."""
        with self._notes_lock:
            firsts = sorted(self._notes)
            place = bisect_right(firsts, number)
            return (self._notes[firsts[place - 1]], firsts[place - 1]) if place else (None, self.first)

    def note(self, state: dict[str, Any]) -> None:
        """Note where a run stands, so that the steps around it are found without the way from the start."""
        read = read_state(state)
        if read.begun is not None and read.begun.micro_done:  # some of that step is behind it
            return
        step = read.delivered.steps
        if step - self._nearest(step)[1] >= _FOLLOWED:
            with self._notes_lock:
                self._notes[step] = state

    def is_near(self, number: int) -> bool:
        """Tell whether a step is found soon: it is kept, or a cursor was noted not far before it."""
        return (
            number in self._kept
            or number - max(self._nearest(number)[1], self._at if self._at <= number else 0) < _NEAR
        )

    def start(self) -> None:
        """Begin to walk through the plan in the background, once: how long it is, and cursors on the way."""
        with self._lock:
            if self._walker is None:
                self._walker = threading.Thread(target=self._walk, name="vlm-stream-view-walk", daemon=True)
                self._walker.start()

    def _walk(self) -> None:
        begin, at, seen, spacing = time.monotonic(), self.first, 0, _NOTED
        worked = begin

        class _TooLongError(Exception):
            pass

        def look(first: int, horizon: Any) -> bool:
            nonlocal at, seen, spacing, worked
            if seen % spacing == 0:
                spacing = self._note(first, horizon.before, spacing)
            seen += 1
            at = first + horizon.num_steps
            if time.monotonic() - begin > _WALK_SECONDS:
                raise _TooLongError
            worked = rest(worked, self._share)
            return False

        try:
            for step in self.plan.after(0).planner.search(self.shape, self._state, look):
                at = step.index + 1
            self.total = at
        except (_TooLongError, RuntimeError):  # RuntimeError: the interpreter ends
            return

    def _note(self, first: int, cursor: Any, spacing: int) -> int:
        """Keep a cursor; once there are many, every other one goes, and the next are twice as far apart."""
        with self._notes_lock:
            self._notes[first] = cursor
            if len(self._notes) < _MAX_NOTES:
                return spacing
            self._notes = {each: self._notes[each] for each in sorted(self._notes)[::2]}
            return spacing * 2


def rest(worked_since: float, share: float) -> float:
    """Sleep after some work so that it takes no more than a share of a core; return the time."""
    if share < 1:
        time.sleep(min((time.monotonic() - worked_since) * (1 / share - 1), _MAX_REST))
    return time.monotonic()
