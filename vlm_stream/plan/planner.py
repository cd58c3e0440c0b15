"""The planner: sources and a config -> steps, from the start or from a state.

Enters: `SourceSpec`s, a reader of index columns, a `PlanConfig`; per run the shape of a step and a state. Leaves:
`Step`s. It holds no position itself, so one planner serves any number of iterations. No files, no clock, no ranks
that talk.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.plan.check import Start, start_from
from vlm_stream.plan.mixture import shares_of
from vlm_stream.plan.queue import UnitQueue
from vlm_stream.plan.samples import Samples, SourceStream, read_refs
from vlm_stream.plan.state import Era, read_state, write_state
from vlm_stream.plan.steps import Block, Partial, Progress, Step, next_block, next_steps, steps_of
from vlm_stream.plan.window import Cursor, Terms, Window, epoch_at, plan_window

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import numpy.typing as npt

    from vlm_stream.plan.balance import BalanceConfig
    from vlm_stream.plan.config import PlanConfig
    from vlm_stream.plan.queue import Place
    from vlm_stream.plan.values import ColumnReader, SourceSpec, StepShape

    Flags = npt.NDArray[np.bool_]

__all__ = ["Count", "Planner"]

_MAX_STEPS: Final = 64
"""That are taken together where they are dealt in the order of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How much is left of a stream."""

    steps: int
    """Steps, one that is begun included."""
    micro_batches: int
    """Of each rank."""
    end: dict[str, Any]
    """A state at the end, to count on from; its digest does not know what was counted."""


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
        self.read_columns = read_columns
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

    @cached_property
    def _fingerprints(self) -> dict[str, Any]:
        """Return what a state must find again."""
        return {
            "sources": [(s.spec.name, s.digest, max(s.epoch_length, 1)) for s in self.streams],
            "plan": self.config.stream_fields(),
            "geometry": self.config.geometry,
            "text": self.config.text,
        }

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(self._fingerprints, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()

    def with_config(self, config: PlanConfig) -> Planner:
        """Return a planner of the same sources with another config."""
        return Planner(self.sources, self.read_columns, config, allow=self._allow)

    def steps(self, shape: StepShape, state: dict[str, Any] | None = None) -> Iterator[Step]:
        """Yield steps from the start or from a state; without end when `epochs` is None or the mixture never stops."""
        return _Run(self, shape, self.start(state)).steps()

    def search(
        self, shape: StepShape, state: dict[str, Any] | None, wanted: Callable[[int, Block], bool]
    ) -> Iterator[Step]:
        """Yield the steps of wanted blocks and deal no others: the quick way to look far ahead.

        `wanted` sees the number of a block's first step, and the block. What was skipped is not in the digest, so the
        steps found have no state. The rest of a step that a state stands in is always yielded.
        """
        return _Run(self, shape, self.start(state)).steps(wanted)

    def count(self, shape: StepShape, state: dict[str, Any] | None = None) -> Count:
        """Count what is left from the start or a state on, without dealing it; never ends where the stream does not."""
        run = _Run(self, shape, self.start(state))
        begun = [step.shape.micro_batches - step.micro_begin for step in run.steps(lambda _first, _block: False)]
        return Count(
            steps=len(begun) + run.num_skipped,
            micro_batches=sum(begun) + run.num_skipped * shape.micro_batches,
            end=self.encode(run.queue.place(), run.progress, None, run.start.eras),
        )

    def start(self, state: dict[str, Any] | None = None) -> Start:
        """Return where the stream starts or goes on; refuse a state that does not belong here."""
        if state is not None:
            return start_from(read_state(state), self.streams, self.read_columns, self.config, self.terms, self._allow)
        zero = Cursor(window=0, draw=0, units=0, positions=(0,) * len(self.streams), carry=Samples.empty())
        return Start(
            cursor=zero,
            done=np.zeros(0, dtype=bool),
            partial=None,
            progress=Progress(),
            eras=(Era(first_window=0, terms=self.terms),),
            window_digest=None,
            reported=0,
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
        self.num_skipped = 0
        self.newest: Cursor | None = None
        """Start of the window that was dealt from last, and its epoch."""
        self.epoch = 0
        self.queue = self._open(start.done, planner, start.cursor)

    def steps(self, wanted: Callable[[int, Block], bool] | None = None) -> Iterator[Step]:
        config = self.planner.config
        yield from self.finish_partial()
        max_steps = 1  # else the first would wait for those behind it
        while (block := next_steps(self.queue, self.shape, config.balance, config.rows, max_steps)) is not None:
            max_steps = min(4 * max_steps, _MAX_STEPS)
            if wanted is None or wanted(self.progress.steps, block):
                yield from self.deal(block)
            else:
                self.skip(block)

    def skip(self, block: Block) -> None:
        """Count a block's steps without dealing them."""
        num_steps = -(-len(block.table) // self.shape.units_per_step)
        self.progress = replace(self.progress, steps=self.progress.steps + num_steps)
        self.num_skipped += num_steps

    def finish_partial(self) -> Iterator[Step]:
        """Go on inside an interrupted block; with another shape, put back what it had not delivered."""
        partial = self.start.partial
        if partial is None:
            return
        same = (partial.shape, partial.balance) == (self.shape, self.planner.config.balance)
        queue = self.queue if same else self._open_as_dealt(partial.balance)
        block = next_block(queue, partial.shape, partial.balance, self.planner.config.rows)
        if block is None:
            raise StateError(
                "The state stands inside a step, but the stream has no units left there. The index or the plan has "
                "changed under it: use the data and the release that wrote the state, or start without it."
            )
        if same:
            yield from self.deal(block, (partial.steps_done, partial.micro_done))
            return
        grid = block.deal().reshape(-1, partial.shape.world_size * partial.shape.batch_size)  # [steps * micro, units]
        delivered = grid[: partial.steps_done * partial.shape.micro_batches + partial.micro_done].ravel()
        done = _with_delivered(self.start.done, block, delivered[delivered >= 0])
        self.queue = self._open(done, self.planner, self.start.cursor)

    def deal(self, block: Block, done: tuple[int, int] = (0, 0)) -> Iterator[Step]:
        first = block.table.windows[0].start
        if first is not self.newest:
            terms = _terms_at(self.start.eras, first.window)
            self.newest, self.epoch = first, epoch_at(first.positions, self.planner.streams, terms)
        steps, self.progress = steps_of(block, self.progress, self._encode, self.epoch, done)
        yield from steps

    def _encode(self, place: Place, progress: Progress, partial: Partial | None) -> dict[str, Any]:
        if self.num_skipped:
            raise StateError(
                "Steps found by a search have no state: the digest of what was delivered before them is not known. "
                "Walk to the step with steps() instead."
            )
        return self.planner.encode(place, progress, partial, self.start.eras)

    def _open_as_dealt(self, balance: BalanceConfig) -> UnitQueue:
        """Open the stream with the costs that an interrupted block was dealt by, down to the carried samples."""
        planner = self.planner.with_config(replace(self.planner.config, balance=balance))
        carry = self.start.cursor.carry
        again = read_refs(carry.refs, planner.sources, planner.read_columns, balance.costs)
        cursor = replace(self.start.cursor, carry=replace(again, age=carry.age))
        return self._open(self.start.done, planner, cursor)

    def _open(self, done: Flags, planner: Planner, cursor: Cursor) -> UnitQueue:
        """Open the stream behind what was delivered, once it has proved to be the stream that the state knows."""
        eras = self.start.eras  # and not `self`: a circle would keep all that was opened for a run beyond its end
        queue = UnitQueue(cursor, lambda cursor: planner.window_at(cursor, eras), self.start.reported)
        expected = self.start.window_digest
        if expected is not None:
            window = queue.peek()
            if window is None or window.digest != expected:
                raise StateError(
                    f"Window {self.start.cursor.window} of the plan does not come out as it was when the state was "
                    f"saved, though seed, sources and config agree: lengths in the index, or the release, changed. "
                    f"Use the data and the release that wrote the state, or start without it."
                )
        queue.discard(done)
        return queue


def _with_delivered(done: Flags, block: Block, delivered: npt.NDArray[np.int64]) -> Flags:
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
        spec = stream.spec
        if names.count(spec.name) > 1:
            raise ConfigError(
                f"Two sources are named '{spec.name}'; positions are kept by name, so one would take the other's. "
                f"Give each source its own name."
            )
        if stream.epoch_length < 1 and spec.weight > 0:
            raise ConfigError(
                f"Source '{spec.name}' delivers no sample: {spec.num_samples} samples at a sample_ratio of "
                f"{spec.sample_ratio}. Raise the ratio, set its weight to 0, or leave the source out."
            )
