"""Plans as pages show them: any step of any plan over the opened datasets, and where a run stands in one.

Enters: settings of a plan, maybe a state. Leaves: `Step`s and `StepView`s. Steps are found by planning ahead. Cursors
are noted on the way and by a thread in the background, so that a step far ahead, or one before the last, does not cost
the way from the start.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vlm_stream.errors import ConfigError, InputError, VlmStreamError
from vlm_stream.plan import find_samples, read_state
from vlm_stream.planning import open_plan
from vlm_stream.view.rows import StepReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vlm_stream.options import StreamOptions
    from vlm_stream.plan import PlannedSample, Ref, Step, StepShape
    from vlm_stream.planning import Plan
    from vlm_stream.view.catalog import Catalog
    from vlm_stream.view.rows import StepView
    from vlm_stream.view.viewer import Pace

SETTINGS: Final = ("mode", "pack_size", "batch_size", "micro_batches", "window", "seed", "barrier")
"""Options that a page may change."""
_KEPT_PLANS: Final = 6
_MOST: Final = {"pack_size": 1 << 24, "window": 1 << 24, "world": 1 << 13}
"""What a page may ask for."""
_MOST_UNITS: Final = 1 << 17
"""Of a step."""
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


class Walk:
    """Finds steps of one plan; may be used by several threads."""

    def __init__(self, plan: Plan, shape: StepShape, state: dict[str, Any] | None, pace: Pace) -> None:
        """Begin at the start or at a state."""
        self.plan, self.shape, self._state, self._pace = plan, shape, state, pace
        self.first = 0 if state is None else read_state(state).delivered.steps
        """The first step that can be found."""
        self.total: int | None = None
        """Steps from the start of the run, once all were walked through."""
        self.compared: dict[int, Any] = {}
        """What the compare page has found of its first steps, by their number."""
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
            self._steps = None  # what has failed, or has ended, does not go on
            for found in steps:
                self._at = found.index + 1
                self._kept[found.index] = found
                if len(self._kept) > _KEPT_STEPS:
                    self._kept.popitem(last=False)
                if found.index >= number:
                    break
            if number not in self._kept:
                raise self._absent(number)
            self._steps = steps
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
            if time.monotonic() - begin > _WALK_SECONDS or self._pace.is_closed:
                raise _TooLongError
            worked = self._pace.rest(worked)
            return False

        try:
            for step in self.plan.after(0).planner.search(self.shape, self._state, look):
                at = step.index + 1
            self.total = at
        except (_TooLongError, RuntimeError):  # RuntimeError: the interpreter ends
            return
        except VlmStreamError:  # the page that needs what cannot be read says so, and the next one begins again
            self._walker = None

    def _note(self, first: int, cursor: Any, spacing: int) -> int:
        """Keep a cursor; once there are many, every other one goes, and the next are twice as far apart."""
        with self._notes_lock:
            self._notes[first] = cursor
            if len(self._notes) < _MAX_NOTES:
                return spacing
            self._notes = {each: self._notes[each] for each in sorted(self._notes)[::2]}
            return spacing * 2


class Settings(NamedTuple):
    """What a plan is cut for."""

    options: StreamOptions
    world: int

    def named(self) -> dict[str, Any]:
        """Return the values that pages show and URLs hold."""
        return {name: getattr(self.options, name) for name in SETTINGS} | {"world": self.world}


class PlanBook:
    """Plans over the opened datasets by their settings."""

    def __init__(
        self, catalog: Catalog, sources: Sequence[Any], processor: Any, base: Settings, lock: threading.Lock
    ) -> None:
        """Take what all plans share; `lock` is held while the processor encodes."""
        self.catalog, self.base = catalog, base
        self._sources, self._processor = tuple(sources), processor
        self.state: dict[str, Any] | None = None
        """Of the plan with the base settings, from which on the world is the present one."""
        self.now: dict[str, Any] | None = None
        """Where the run stands: there, or later."""
        self.epochs_before = 0
        self._is_followed = False
        self._walks: OrderedDict[Any, Walk] = OrderedDict()
        self._lock, self._encoding = threading.Lock(), lock

    def settings(self, values: Mapping[str, str], suffix: str = "") -> Settings:
        """Return the base settings with what a URL changes.

        Raises:
            ConfigError: A value means nothing, or more than a page can show.
        """
        changes: dict[str, Any] = {}
        for name in SETTINGS:
            text = values.get(f"{name}{suffix}", "").strip()
            if text:
                changes[name] = text if name in ("mode", "barrier") else self._whole(name, text)
        world = values.get(f"world{suffix}", "").strip()
        size = self._whole("world", world) if world else self.base.world
        found = Settings(replace(self.base.options, **changes) if changes else self.base.options, size)
        units, most = (each.options.shape(each.world).units_per_step for each in (found, self.base))
        if units > max(_MOST_UNITS, most):
            raise ConfigError(
                f"a step of {units:,} packs or samples is more than a page can show ({_MOST_UNITS:,}); choose a "
                f"smaller world, batch_size or micro_batches"
            )
        return found

    def _whole(self, name: str, text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 12:
            raise ConfigError(f"{name}={text!r:.60} is not a whole number; write one, or leave it out")
        value, least = int(text), 0 if name == "seed" else 1
        most = max(_MOST.get(name, _MOST_UNITS), self.base.named()[name] or 0)
        if value < least or (value > most and name != "seed"):
            raise ConfigError(f"{name}={value:,} cannot be shown; give a number from {least} to {most:,}")
        return value

    def walk(self, settings: Settings, *, from_state: bool = False) -> Walk:
        """Return the steps of a plan, opened once while it is among the latest."""
        from_state = from_state and self.state is not None
        key = (tuple(settings.named().items()), self.epochs_before, from_state)
        with self._lock:
            if key not in self._walks:
                if settings.options == self.base.options:
                    plan = self.catalog.plan
                else:
                    plan = open_plan(self._sources, settings.options, self._processor, opened=self.catalog.datasets)
                shape = settings.options.shape(settings.world)
                state = self.state if from_state else None
                self._walks[key] = Walk(plan.after(self.epochs_before), shape, state, self.catalog.pace)
                if len(self._walks) > _KEPT_PLANS:
                    self._walks.popitem(last=False)
            self._walks.move_to_end(key)
            return self._walks[key]

    def stand_at(self, state: dict[str, Any] | None, epochs_before: int = 0) -> None:
        """Take the state of a saved run."""
        self.state = self.now = state
        self.epochs_before = epochs_before

    def follow(self, state: dict[str, Any] | None, epochs_before: int) -> None:
        """Note where a running loader stands; the world is known from the first of these states of a round on."""
        is_earlier = _steps_of(state) < _steps_of(self.now)  # the loader was told to go on elsewhere
        if not self._is_followed or is_earlier or epochs_before != self.epochs_before:
            self._is_followed = True
            self.stand_at(state, epochs_before)
        self.now = state
        if state is not None:
            self.run_walk().note(state)

    def run_walk(self) -> Walk:
        """Return the steps of the run, from where its world is known."""
        return self.walk(self.base, from_state=True)

    def walk_to(self, settings: Settings, number: int) -> Walk:
        """Return the walk that has a step: that of the run, on any number of ranks, else one from the start."""
        walk = self.walk(settings, from_state=settings.options == self.base.options)
        return walk if number >= walk.first else self.walk(settings)

    def find(self, settings: Settings, refs: Sequence[Ref]) -> tuple[PlannedSample, ...]:
        """Return where samples are delivered next, or were since the world of the run is known."""
        goes_on = settings.options == self.base.options
        walk = self.walk(settings, from_state=goes_on)
        planner, wanted = walk.plan.after(0).planner, set(refs)
        if goes_on and self.now is not None:
            found = find_samples(planner, walk.shape, wanted, state=self.now)
            if found or self.now is self.state:
                return found
        return find_samples(planner, walk.shape, wanted, state=self.state if goes_on else None)

    def view(self, settings: Settings, number: int, rank: int, *, is_built: bool = False) -> StepView:
        """Return what one rank gets at one step.

        Raises:
            InputError: There is no such step or rank.
        """
        if not 0 <= rank < settings.world:
            raise InputError(f"there is no rank {rank} among {settings.world}; ranks count from 0")
        walk = self.walk_to(settings, number)
        step = walk.step(number)
        begins = None if self.state is None or walk.first == _steps_of(self.state) else _steps_of(self.state)
        walk.start()
        reader = StepReader(self.catalog, walk, self._processor)
        if not is_built:
            return replace(reader.read(step, rank, is_built=False), run_begins=begins)
        with self._encoding:
            return replace(reader.read(step, rank, is_built=True), run_begins=begins)


def _steps_of(state: dict[str, Any] | None) -> int:
    return 0 if state is None else read_state(state).delivered.steps
