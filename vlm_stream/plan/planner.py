"""The planner: sources and a config -> steps, from the start or from a state.

Enters: `SourceSpec`s, a reader of index columns, a `PlanConfig`; per run the shape of a step and a state. Leaves: `Step`s. It
holds no position itself, so one planner serves any number of iterations. No files, no clock, no ranks that talk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.plan.check import Start, start_from
from vlm_stream.plan.mixture import shares_of
from vlm_stream.plan.queue import UnitQueue
from vlm_stream.plan.randomness import Key
from vlm_stream.plan.samples import Samples, SourceStream
from vlm_stream.plan.state import Era, read_state, window_digest, write_state
from vlm_stream.plan.steps import Block, Partial, Progress, Step, next_block, steps_of
from vlm_stream.plan.window import Cursor, Terms, Window, epoch_at, plan_window

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from vlm_stream.plan.config import PlanConfig
    from vlm_stream.plan.queue import Place
    from vlm_stream.plan.values import ColumnReader, SourceSpec, StepShape

__all__ = ["Planner"]


class Planner:
    """Plans what every rank consumes."""

    def __init__(
        self,
        sources: Sequence[SourceSpec],
        read_columns: ColumnReader,
        config: PlanConfig,
        *,
        allow: Collection[str] = (),
    ) -> None:
        """Check the sources; nothing is read yet. `allow` names differences that a state may have: see `check.py`."""
        self.config = config
        self.sources = tuple(sources)
        self._read = read_columns
        self._allow = tuple(allow)
        self.streams = tuple(
            SourceStream(number, spec, read_columns, config) for number, spec in enumerate(self.sources)
        )
        _check_sources(self.streams)
        self.terms = Terms(
            names=tuple(spec.name for spec in self.sources),
            shares=shares_of(self.sources, config.mixture.weigh_by),
            stop=config.mixture.stop,
            epochs=config.epochs,
        )
        self._fingerprints = {
            "sources": [(s.spec.name, s.digest, s.epoch_length) for s in self.streams],
            "plan": config.stream_fields(),
            "geometry": config.geometry,
        }

    def steps(self, shape: StepShape, state: dict[str, Any] | None = None) -> Iterator[Step]:
        """Yield steps from the start or from a state; without end when `epochs` is None or the mixture never stops."""
        run = _Run(self, shape, self.start(state))
        yield from run.steps()

    def blocks(self, shape: StepShape, state: dict[str, Any] | None = None) -> Iterator[tuple[int, Block]]:
        """Yield undealt blocks with the number of their first step: the quick way to look far ahead.

        From a state inside a step, the rest of that step is dealt first and yields no block.
        """
        run = _Run(self, shape, self.start(state))
        for _ in run.finish_partial():
            pass
        while (block := run.next_block()) is not None:
            yield run.progress.steps, block
            run.skip(block)

    def start(self, state: dict[str, Any] | None = None) -> Start:
        """Return where the stream starts or goes on; refuse a state that does not belong here."""
        if state is not None:
            return start_from(read_state(state), self.streams, self._read, self.config, self.terms, self._allow)
        zero = Cursor(window=0, draw=0, units=0, positions=(0,) * len(self.streams), carry=Samples.empty())
        return Start(
            cursor=zero,
            done=np.zeros(0, dtype=bool),
            partial=None,
            progress=Progress(),
            eras=(Era(first_window=0, terms=self.terms),),
            window_digest=None,
        )

    def window_at(self, cursor: Cursor, eras: Sequence[Era] | None = None) -> Window | None:
        """Plan the window at a cursor, under the terms of its era."""
        terms = _terms_at(eras, cursor.window) if eras else self.terms
        return plan_window(cursor, self.streams, self.config, terms)

    def encode(self, place: Place, progress: Progress, partial: Partial | None, eras: Sequence[Era]) -> dict[str, Any]:
        """Return a place as a state."""
        return write_state(place, progress, partial, eras, self._fingerprints)


class _Run:
    """One iteration: the queue and what it has delivered."""

    def __init__(self, planner: Planner, shape: StepShape, start: Start) -> None:
        self.planner = planner
        self.shape = shape
        self.start = start
        self.progress = start.progress
        self.queue = self._open(start.done)

    def steps(self) -> Iterator[Step]:
        yield from self.finish_partial()
        while (block := self.next_block()) is not None:
            yield from self._deal(block)

    def next_block(self) -> Block | None:
        return next_block(self.queue, self.shape, self.planner.config.balance)

    def skip(self, block: Block) -> None:
        """Count a block's steps without dealing them."""
        num_steps = -(-len(block.table) // self.shape.units_per_step)
        self.progress = Progress(steps=self.progress.steps + num_steps)

    def finish_partial(self) -> Iterator[Step]:
        """Go on inside an interrupted block; with another shape, put back what it had not delivered."""
        partial = self.start.partial
        if partial is None:
            return
        block = next_block(self.queue, partial.shape, partial.balance)
        if block is None:
            raise StateError(
                "The state stands inside a step, but the stream has no units left there. The index or the plan has "
                "changed under it: use the data and the release that wrote the state, or start without it."
            )
        if (partial.shape, partial.balance) == (self.shape, self.planner.config.balance):
            yield from self._deal(block, (partial.steps_done, partial.micro_done))
            return
        grid = block.deal()
        delivered = np.concatenate(
            [grid[: partial.steps_done].ravel(), grid[partial.steps_done, : partial.micro_done].ravel()]
            if partial.micro_done
            else [grid[: partial.steps_done].ravel()]
        )
        self.queue = self._open(_with_delivered(self.start.done, block, delivered[delivered >= 0]))

    def _deal(self, block: Block, done: tuple[int, int] = (0, 0)) -> Iterator[Step]:
        first = block.table.windows[0].start
        epoch = epoch_at(first.positions, self.planner.streams, _terms_at(self.start.eras, first.window))
        steps, self.progress = steps_of(block, self.progress, self._encode, epoch, done)
        yield from steps

    def _encode(self, place: Place, progress: Progress, partial: Partial | None) -> dict[str, Any]:
        return self.planner.encode(place, progress, partial, self.start.eras)

    def _open(self, done: Any) -> UnitQueue:
        queue = UnitQueue(self.start.cursor, lambda cursor: self.planner.window_at(cursor, self.start.eras))
        expected = self.start.window_digest
        if expected is not None:
            window = queue.peek()
            if window is None or window_digest(window) != expected:
                raise StateError(
                    f"Window {self.start.cursor.window} of the plan does not come out as it was when the state was "
                    f"saved, though seed, sources and config agree: lengths in the index, or the release, have changed. "
                    f"Use the data and the release that wrote the state, or start without it."
                )
        queue.discard(done)
        return queue


def _with_delivered(done: Any, block: Block, delivered: Any) -> Any:
    """Mark units of an interrupted block as delivered, counted from the start of the first window."""
    sizes = {w.start.window: w.num_units for w in (*block.before.windows, *block.table.windows)}
    first = block.before.cursor.window
    begins, total = {}, 0
    for window in range(first, max(sizes) + 1):
        begins[window] = total
        total += sizes.get(window, 0)
    flags = np.zeros(total, dtype=bool)
    flags[: len(done)] = done
    base = np.asarray([begins[w.start.window] for w in block.table.windows], dtype=np.int64)
    flags[base[block.table.window[delivered]] + block.table.unit[delivered]] = True
    return flags


def _terms_at(eras: Sequence[Era], window: int) -> Terms:
    return [era for era in eras if era.first_window <= window][-1].terms


def _check_sources(streams: Sequence[SourceStream]) -> None:
    names = [stream.spec.name for stream in streams]
    if not names:
        raise ConfigError("The plan has no sources, so there is nothing to deliver. Give at least one.")
    for stream in streams:
        if names.count(stream.spec.name) > 1:
            raise ConfigError(
                f"Two sources are named '{stream.spec.name}'; positions are kept by name, so one would take the "
                f"other's. Give each source its own name."
            )
        if stream.spec.weight > 0 and stream.epoch_length < 1:
            raise ConfigError(
                f"Source '{stream.spec.name}' delivers no sample: {stream.spec.num_samples} samples at a sample_ratio "
                f"of {stream.spec.sample_ratio}. Raise the ratio, set its weight to 0, or leave the source out."
            )
