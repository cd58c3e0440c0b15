"""Questions to a plan: what is in step N, and when does a sample come.

Enters: a planner, the shape of a step, a step number or a ref, maybe a state to start from. Leaves: `Delivery`
values. Answers are found by planning ahead without dealing, so that only the steps in question are dealt.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.plan.planner import Planner
    from vlm_stream.plan.steps import Block, Step
    from vlm_stream.plan.values import Ref, StepShape

__all__ = ["Delivery", "find_sample", "samples_of_step", "state_before_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
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


def samples_of_step(
    planner: Planner, shape: StepShape, step: int, *, rank: int | None = None, state: dict[str, Any] | None = None
) -> tuple[Delivery, ...]:
    """Return the samples of one step, of one rank or of all, in the order of delivery."""

    def holds_step(first: int, block: Block) -> bool:
        return first + -(-len(block.table) // shape.units_per_step) > step

    for found in planner.search(shape, state, holds_step):
        if found.index == step:
            return tuple(d for d in _deliveries(planner, found) if rank is None or d.rank == rank)
        if found.index > step:
            break
    raise InputError(
        f"Step {step} is not ahead: the run ends before it, or the state stands behind it. Ask for another step, or "
        f"start from the beginning of the run or from an earlier state."
    )


def find_sample(
    planner: Planner, shape: StepShape, ref: Ref, *, state: dict[str, Any] | None = None, max_steps: int | None = None
) -> Delivery | None:
    """Return where a sample is delivered next; None when it is not, within `max_steps` or before the end.

    An endless stream needs `max_steps` for samples that are never delivered.
    """

    def may_hold_sample(first: int, block: Block) -> bool:
        past = max_steps is not None and first >= begin + max_steps
        return past or any((window.samples.refs == ref).all(axis=1).any() for window in block.table.windows)

    begin = planner.start(state).progress.steps
    name = planner.sources[ref.source].name
    for step in planner.search(shape, state, may_hold_sample):
        if max_steps is not None and step.index >= begin + max_steps:
            return None
        for delivery in _deliveries(planner, step):
            if (delivery.source, delivery.shard, delivery.sample_row) == (name, ref.shard, ref.row):
                return delivery
    return None


def state_before_step(
    planner: Planner, shape: StepShape, step: int, *, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state with which a run goes on at that step: to rewind, or to skip ahead, without a saved state."""
    for found in planner.steps(shape, state):
        if found.index == step - 1:
            return found.state_after()
        if found.index >= step:
            break
    raise InputError(
        f"No step ends right before step {step}: it is the first one, the run ends earlier, or the state stands behind "
        f"it. Ask for another step, or begin without a state."
    )


def _deliveries(planner: Planner, step: Step) -> Iterator[Delivery]:
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
                    yield Delivery(
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
