"""Steps: what every rank consumes next, and the state after each micro-step.

Enters: a queue of units. Leaves: `Step`. `balance.horizon` steps are assigned together; a state inside of them is the
cursor before the first, with the shape that they were assigned for and how much of them is done: enough to assign them
again.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vlm_stream.plan.balance import assign
from vlm_stream.plan.queue import Begun, Cursor, Delivered, UnitQueue, UnitTable
from vlm_stream.plan.values import BalanceConfig, Dropped, Ints, Ref, RowPolicy, StepShape, take_rows

Encode = Callable[[Cursor], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Horizon:
    """Steps that are assigned together."""

    table: UnitTable
    shape: StepShape
    balance: BalanceConfig
    policy: RowPolicy
    before: Cursor
    after: Cursor

    @property
    def num_steps(self) -> int:
        """Return how many steps there are: fewer than `balance.horizon` at the end of the stream."""
        return -(-len(self.table) // self.shape.units_per_step)

    def assign(self) -> Ints:
        """Return [steps, micro, rank, row] of numbers in the table, -1 for fillers."""
        return assign(self.table, self.shape, self.balance, self.policy)


def next_horizon(queue: UnitQueue, shape: StepShape, balance: BalanceConfig, policy: RowPolicy) -> Horizon | None:
    """Take the units of the next steps; None at the end of the stream."""
    before = queue.cursor()
    table = queue.take(shape.units_per_step * balance.horizon)
    if table is None:
        return None
    after = queue.cursor()
    first = table.windows[0]
    digest = before.window_digest
    if digest is None and first.start.number == before.window.number:
        digest = first.digest
    # a state inside the horizon has to find the windows again that were planned for it.
    before = replace(before, planned=after.planned, window_digest=digest)
    return Horizon(table=table, shape=shape, balance=balance, policy=policy, before=before, after=after)


class Step:
    """What all ranks consume between two updates of the weights."""

    def __init__(
        self, horizon: Horizon, number: int, grid: Ints, delivered: list[Delivered], encode: Encode, *, epoch: int
    ) -> None:
        """Bind a step of a horizon to what is delivered before each of its remaining micro-steps and after the last."""
        self._horizon = horizon
        self._number = number
        self._grid = grid  # [micro, rank, row]
        self._delivered = delivered
        self._encode = encode
        self.index = delivered[0].steps
        """Number of the step since the start of the run; goes on over a resume. What is left of a step that was
        interrupted and assigned again for another shape begins with that step's number."""
        self.epoch = epoch  # epoch of the mixture in which the step's first unit was drawn
        self.micro_begin = horizon.shape.micro_batches - (len(delivered) - 1)
        """First micro-step that is still to be delivered: above 0 only right after a resume inside a step."""
        self.dropped: tuple[Dropped, ...] = horizon.table.dropped if number == 0 else ()
        """Samples that the plan left out or shortened where this step's units were cut."""

    @property
    def shape(self) -> StepShape:
        return self._horizon.shape

    @property
    def table(self) -> UnitTable:
        """Return the units that `numbers` counts."""
        return self._horizon.table

    def numbers(self) -> Ints:
        """Return [micro, rank, row] of numbers in `table`; -1 for fillers."""
        return self._grid

    def refs(self, rank: int, micro: int) -> list[tuple[Ref, ...]]:
        """Return the samples of the rows of one micro-batch; a filler row has none."""
        return _refs_at(self.table, self._grid[micro, rank])

    def tokens(self, rank: int, micro: int) -> int:
        numbers = self._grid[micro, rank]
        return int(self.table.tokens[numbers[numbers >= 0]].sum())

    def labels(self, rank: int, micro: int) -> int | None:
        """Return how many tokens of one micro-batch are learned; None: unknown for one of its samples."""
        count = int(self._labels[micro, rank])
        return count if count >= 0 else None

    @property
    def positions(self) -> tuple[float, ...]:
        """Return about how many samples of each source were drawn for the steps before it, over all epochs."""
        at = self._number * self.shape.units_per_step
        window = self.table.windows[self.table.window[at]]
        done = float(self.table.unit[at]) / window.num_units
        pairs = zip(window.start.positions, window.after.positions, strict=True)
        return tuple(begin + done * (end - begin) for begin, end in pairs)

    @property
    def total_labels(self) -> int | None:
        """Return how many tokens are learned in the step, over all its ranks and micro-batches.

        Also those before `micro_begin`. None: one of its samples has no count, or was cut.
        """
        count = int(self._labels.sum())
        return count if count >= 0 else None

    @cached_property
    def _labels(self) -> Ints:
        """Return [micro, rank] the labels of each micro-batch; below 0: unknown."""
        return np.asarray(np.where(self._grid >= 0, self.table.labels[self._grid], 0).sum(axis=2))

    def state_after(self, micro: int | None = None) -> dict[str, Any]:
        """Return the state once all ranks have consumed the step up to and with that micro-step (all by default)."""
        horizon = self._horizon
        last = horizon.shape.micro_batches - 1
        micro = last if micro is None else micro
        delivered = self._delivered[micro - self.micro_begin + 1]
        if micro == last and self._number == horizon.num_steps - 1:
            return self._encode(replace(horizon.after, delivered=delivered))
        begun = Begun(
            shape=horizon.shape,
            balance=horizon.balance,
            steps_done=self._number + (micro == last),
            micro_done=0 if micro == last else micro + 1,
        )
        return self._encode(replace(horizon.before, delivered=delivered, begun=begun))


def steps_of(
    horizon: Horizon, start: Delivered, encode: Encode, epoch: int, done: tuple[int, int] = (0, 0)
) -> tuple[list[Step], Delivered]:
    """Cut a horizon into steps, from (steps, micro-steps) `done` on; return them and what is delivered after them."""
    grid = horizon.assign()  # [steps, micro, rank, row]
    micro_batches = horizon.shape.micro_batches
    flat = grid.reshape(-1, horizon.shape.world_size * horizon.shape.batch_size)  # [micro-steps, unit]
    hashed = _hash_micro_steps(horizon.table, flat[done[0] * micro_batches + done[1] :])
    steps = []
    for number in range(done[0], len(grid)):
        delivered = [start]
        for micro in range(done[1] if number == done[0] else 0, micro_batches):
            hashes, units, samples = next(hashed)
            start = Delivered(
                steps=start.steps + (micro == micro_batches - 1),
                units=start.units + units,
                samples=start.samples + samples,
                digest=hashlib.blake2b(bytes.fromhex(start.digest) + hashes, digest_size=16).hexdigest(),
            )
            delivered.append(start)
        steps.append(Step(horizon, number, grid[number], delivered, encode, epoch=epoch))
    return steps, start


def _hash_micro_steps(table: UnitTable, numbers: Ints) -> Iterator[tuple[bytes, int, int]]:
    """Yield for [micro-steps, unit] the hashes of their units, how many these are, and their samples."""
    real = numbers >= 0
    units = numbers[real]
    hashes = table.hashes[units].astype("<u8", copy=False)
    ends = np.concatenate([[0], np.cumsum(real.sum(axis=1))])
    samples = np.concatenate([[0], np.cumsum(table.num_samples[units])])[ends]
    counts = zip(np.diff(ends).tolist(), np.diff(samples).tolist(), strict=True)
    for (begin, end), (num_units, num_samples) in zip(itertools.pairwise(ends.tolist()), counts, strict=True):
        yield hashes[begin:end].tobytes(), num_units, num_samples


def _refs_at(table: UnitTable, numbers: Ints) -> list[tuple[Ref, ...]]:
    """Return the samples of some units of a table; none for fillers."""
    refs: list[tuple[Ref, ...]] = [()] * len(numbers)
    for place, window in enumerate(table.windows):
        here = np.flatnonzero((numbers >= 0) & (table.window[numbers] == place))
        samples, splits = take_rows(window.splits, table.unit[numbers[here]])
        found = [Ref(*ref) for ref in window.samples.refs[samples].tolist()]
        for row, (begin, end) in zip(here.tolist(), itertools.pairwise(splits.tolist()), strict=True):
            refs[row] = tuple(found[begin:end])
    return refs
