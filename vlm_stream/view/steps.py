"""Plans as pages show them: any step of any plan over the opened datasets, and where a run stands in one.

Enters: settings of a plan. Leaves: walks, and `StepView`s. Steps are found by planning ahead from the
nearest cursor that was noted on the way, so that going back does not begin at the start.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vlm_stream.errors import ConfigError, InputError
from vlm_stream.plan import find_samples, read_state
from vlm_stream.planning import open_plan
from vlm_stream.view.rows import StepReader
from vlm_stream.view.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.options import StreamOptions
    from vlm_stream.plan import PlannedSample, Ref
    from vlm_stream.view.catalog import Catalog
    from vlm_stream.view.rows import StepView

SETTINGS: Final = ("mode", "pack_size", "batch_size", "micro_batches", "window", "seed", "barrier")
"""Options that a page may change."""
_KEPT_PLANS: Final = 6
_MOST: Final = {"pack_size": 1 << 24, "window": 1 << 24, "world": 1 << 13}
"""What a page may ask for."""
_MOST_UNITS: Final = 1 << 17
"""Of a step."""


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
        self.share = 1.0
        """Of a core that threads in the background take."""
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
                self._walks[key] = Walk(plan.after(self.epochs_before), shape, state, share=self.share)
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
