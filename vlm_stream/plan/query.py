"""Questions to a plan: what is in step N, and when does a sample come.

Enters: a planner, the shape of a step, a step number or a ref, maybe a state to start from. Leaves: `PlannedSample`
values. Answers are found by planning ahead, and only the steps in question are assigned.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.plan.config import StepShape
    from vlm_stream.plan.planner import Planner
    from vlm_stream.plan.steps import Horizon, Step
    from vlm_stream.plan.values import Ref

__all__ = ["PlannedSample", "find_sample", "samples_of_step", "step_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """One sample at its place in the run."""

    step: int
    rank: int
    micro: int
    row: int
    """Row of the micro-batch: a pack, a group or a sample."""
    place: int
    """Place within the row."""
    source: str
    shard: int
    sample_row: int
    """Row of the sample in its shard's index; with shard and source the key is found there."""
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def step_at(planner: Planner, shape: StepShape, step: int, *, state: dict[str, Any] | None = None) -> Step:
    """Return one step that is ahead; it has no state, because what comes before it is skipped."""

    def holds_step(first: int, horizon: Horizon) -> bool:
        return first + horizon.num_steps > step

    for found in planner.search(shape, state, holds_step):
        if found.index == step:
            return found
        if found.index > step:
            break
    raise InputError(
        f"Step {step} is not ahead: the run ends before it, or the state stands after it. Ask for another step, or "
        f"start from the beginning of the run or from an earlier state."
    )


def samples_of_step(
    planner: Planner, shape: StepShape, step: int, *, rank: int | None = None, state: dict[str, Any] | None = None
) -> tuple[PlannedSample, ...]:
    """Return the samples of one step, of one rank or of all, in the order of delivery."""
    found = step_at(planner, shape, step, state=state)
    return tuple(sample for sample in _deliveries(planner, found) if rank is None or sample.rank == rank)


def find_sample(
    planner: Planner, shape: StepShape, ref: Ref, *, state: dict[str, Any] | None = None
) -> PlannedSample | None:
    """Return where a sample is delivered next; None when the stream ends before."""

    def may_hold_sample(_first: int, horizon: Horizon) -> bool:
        return any((window.samples.refs == ref).all(axis=1).any() for window in horizon.table.windows)

    name = planner.sources[ref.source].name
    for step in planner.search(shape, state, may_hold_sample):
        for delivery in _deliveries(planner, step):
            if (delivery.source, delivery.shard, delivery.sample_row) == (name, ref.shard, ref.row):
                return delivery
    return None


def _deliveries(planner: Planner, step: Step) -> Iterator[PlannedSample]:
    table, grid = step.table, step.numbers()
    for micro in range(step.micro_begin, grid.shape[0]):
        for rank in range(grid.shape[1]):
            for row, number in enumerate(grid[micro, rank].tolist()):
                if number < 0:
                    continue
                window, unit = table.windows[int(table.window[number])], int(table.unit[number])
                members = np.arange(window.splits[unit], window.splits[unit + 1])
                refs, tokens = window.samples.refs[members].tolist(), window.samples.tokens[members].tolist()
                for place, ((source, shard, sample_row), length) in enumerate(zip(refs, tokens, strict=True)):
                    yield PlannedSample(
                        step=step.index,
                        rank=rank,
                        micro=micro,
                        row=row,
                        place=place,
                        source=planner.sources[source].name,
                        shard=shard,
                        sample_row=sample_row,
                        tokens=length,
                    )
