"""The planner: sources and a config -> steps, from the start or from a state.

Enters: `SourceSpec`s, a reader of index columns, a `PlanConfig`; per run the shape of a step and a state. Leaves:
`Step`s. It holds no cursor itself, so one planner serves any number of iterations. No files, no clock, no ranks
that talk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.plan.mixture import shares_of
from vlm_stream.plan.order import Samples, SourceStream
from vlm_stream.plan.queue import Cursor, Delivered, UnitQueue
from vlm_stream.plan.resume import resume
from vlm_stream.plan.state import USUAL, Fingerprints, read_state, write_state
from vlm_stream.plan.steps import Horizon, Step, next_horizon, steps_of
from vlm_stream.plan.values import BalanceConfig, ColumnReader, Dropped, PlanConfig, SourceSpec, StepShape
from vlm_stream.plan.window import Terms, Window, WindowStart, epoch_at, plan_window


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How much is left of a stream."""

    steps: int  # steps, one that is begun included
    micro_batches: int  # of each rank
    end: dict[str, Any]  # a state at the end, to count on from; its digest does not know what was counted


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
        """Check the sources; nothing is read yet. `allow` names differences that a state may have (`OVERRIDES`)."""
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
    def _fingerprints(self) -> Fingerprints:
        return Fingerprints(
            sources=tuple(
                (s.spec.name, _short(f"{s.spec.digest}:{s.spec.sample_ratio!r}"), max(s.epoch_length, 1))
                for s in self.streams
            ),
            plan={n: value for n, value in self.config.stream_fields().items() if n not in USUAL or value != USUAL[n]},
            geometry=self.config.geometry,
            text=self.config.text[:16],
        )

    @cached_property
    def digest(self) -> str:
        """Return 16 hex characters of everything that a state must find again: the plan's part of a batch's name."""
        return _short(json.dumps(asdict(self._fingerprints)))

    def with_config(self, config: PlanConfig) -> Planner:
        return Planner(self.sources, self.read_columns, config, allow=self._allow)

    def steps(
        self, shape: StepShape, state: dict[str, Any] | None = None, *, left_out: list[Dropped] | None = None
    ) -> Iterator[Step]:
        """Yield steps from the start or from a state; without end when `epochs` is None or the mixture never stops.

        `left_out` is given what the stream ends without, which no step tells.
        """
        return _Run(self, shape, self.start(state)).steps(left_out=left_out)

    def search(
        self, shape: StepShape, state: dict[str, Any] | None, wanted: Callable[[int, Horizon], bool]
    ) -> Iterator[Step]:
        """Yield the steps of wanted horizons and assign no others: the quick way to look far ahead.

        `wanted` sees the number of a horizon's first step, and the horizon. What was skipped is not in the digest, so
        the steps found have no state. The rest of a step that a state stands in is always yielded.
        """
        return _Run(self, shape, self.start(state)).steps(wanted)

    def count(self, shape: StepShape, state: dict[str, Any] | None = None) -> Count:
        """Count what is left from the start or a state on, without assigning it; never ends if the stream does not."""
        run = _Run(self, shape, self.start(state))
        begun = [step.shape.micro_batches - step.micro_begin for step in run.steps(lambda _first, _horizon: False)]
        return Count(
            steps=len(begun) + run.num_skipped,
            micro_batches=sum(begun) + run.num_skipped * shape.micro_batches,
            end=self.encode(replace(run.queue.cursor(), delivered=run.delivered)),
        )

    def start(self, state: dict[str, Any] | None = None) -> Cursor:
        """Return the cursor at the start or of a state; refuse a state that does not belong here."""
        if state is not None:
            return resume(read_state(state), self._fingerprints, self.streams, self.terms, self._allow)
        return Cursor(
            window=WindowStart(number=0, draw=0, positions=(0,) * len(self.streams), carry=Samples.none()),
            done=np.zeros(0, dtype=bool),
            window_digest=None,
            planned=0,
            terms=(self.terms,),
            delivered=Delivered(),
        )

    def windows(self) -> Iterator[Window]:
        """Yield the windows of the unit stream, from the start."""
        start = self.start().window
        while (window := plan_window(start, self.streams, self.config, self.terms)) is not None:
            yield window
            start = window.after

    def encode(self, cursor: Cursor) -> dict[str, Any]:
        return write_state(cursor, self._fingerprints)


class _Run:
    """One iteration: the queue and what it has delivered."""

    def __init__(self, planner: Planner, shape: StepShape, start: Cursor) -> None:
        self.planner = planner
        self.shape = shape
        self.start = start
        self.delivered = start.delivered
        self.num_skipped = 0
        self.queue = _open_queue(planner, start)

    def steps(
        self, wanted: Callable[[int, Horizon], bool] | None = None, left_out: list[Dropped] | None = None
    ) -> Iterator[Step]:
        config = self.planner.config
        yield from self.finish_begun()
        while (horizon := next_horizon(self.queue, self.shape, config.balance, config.row_policy)) is not None:
            if wanted is None or wanted(self.delivered.steps, horizon):
                yield from self.cut(horizon)
            else:
                self.delivered = replace(self.delivered, steps=self.delivered.steps + horizon.num_steps)
                self.num_skipped += horizon.num_steps
        if left_out is not None:
            left_out += self.queue.left_out

    def finish_begun(self) -> Iterator[Step]:
        """Go on inside interrupted steps; with another shape, put back what they had not delivered."""
        begun = self.start.begun
        if begun is None:
            return
        same = (begun.shape, begun.balance) == (self.shape, self.planner.config.balance)
        queue = self.queue if same else self._open_as_assigned(begun.balance)
        horizon = next_horizon(queue, begun.shape, begun.balance, self.planner.config.row_policy)
        if horizon is None:
            raise StateError(
                "The state stands inside a step, but the stream has no units left there. The index or the plan has "
                "changed under it: use the data and the release that wrote the state, or start without it."
            )
        if same:
            yield from self.cut(horizon, (begun.steps_done, begun.micro_done))
            return
        grid = horizon.assign().reshape(-1, begun.shape.world_size * begun.shape.batch_size)  # [steps * micro, units]
        numbers = grid[: begun.steps_done * begun.shape.micro_batches + begun.micro_done].ravel()
        numbers = numbers[numbers >= 0]
        table = horizon.table
        self.queue.remove(
            {
                window.start.number: table.unit[numbers[table.window[numbers] == place]]
                for place, window in enumerate(table.windows)
            }
        )

    def cut(self, horizon: Horizon, done: tuple[int, int] = (0, 0)) -> Iterator[Step]:
        first = horizon.table.windows[0].start
        epoch = epoch_at(first.positions, self.planner.streams, self.start.terms_at(first.number))
        steps, self.delivered = steps_of(horizon, self.delivered, self._encode, epoch, done)
        yield from steps

    def _encode(self, cursor: Cursor) -> dict[str, Any]:
        if self.num_skipped:
            raise StateError(
                "Steps found by a search have no state: the digest of what was delivered before them is not known. "
                "Walk to the step with steps() instead."
            )
        return self.planner.encode(cursor)

    def _open_as_assigned(self, balance: BalanceConfig) -> UnitQueue:
        """Open the stream with the costs that interrupted steps were assigned by, down to the carried samples."""
        planner = self.planner.with_config(replace(self.planner.config, balance=balance))
        carry = self.start.window.carry
        vit = carry.vit.copy()
        for stream in planner.streams:
            mine = np.flatnonzero(carry.refs[:, 0] == stream.number)
            mine = mine[np.argsort(carry.position[mine])]
            vit[mine] = stream.take(carry.position[mine]).vit
        window = replace(self.start.window, carry=replace(carry, vit=vit))
        return _open_queue(planner, replace(self.start, window=window))


def _open_queue(planner: Planner, start: Cursor) -> UnitQueue:
    """Open the stream after what was delivered, once it has proved to be the stream that the state knows."""
    # a function of its own: a method would close over the run, and the reference cycle would keep it alive.
    queue = UnitQueue(
        start, lambda window: plan_window(window, planner.streams, planner.config, start.terms_at(window.number))
    )
    if start.window_digest is not None:
        window = queue.peek()
        if window is None or window.digest != start.window_digest:
            raise StateError(
                f"Window {start.window.number} of the plan does not come out as it was when the state was "
                f"saved, though seed, sources and config agree: lengths in the index, or the release, changed. "
                f"Use the data and the release that wrote the state, or start without it."
            )
    queue.discard(start.done)
    return queue


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


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
                f"{spec.sample_ratio}. Raise the ratio, or leave the source out."
            )
