"""Steps: what every rank consumes next, and the state after each micro-step.

Enters: a block of dealt units. Leaves: `Step`. A block is `horizon` steps dealt together. The state in the middle of
a block is the place where the block began, the shape it was dealt for, and how much of it is done: enough to deal it
again. Where single steps are dealt in the order of the stream, many are taken together because that is quicker: their
states do not show it.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.plan.deal import deal, deals_in_order
from vlm_stream.plan.queue import Place
from vlm_stream.plan.values import Ref, Unit
from vlm_stream.ragged import take_rows
from vlm_stream.tuples import make_tuples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from vlm_stream.plan.balance import BalanceConfig
    from vlm_stream.plan.queue import UnitQueue, UnitTable
    from vlm_stream.plan.values import Dropped, StepShape
    from vlm_stream.plan.window import Window

__all__ = ["Block", "Partial", "Progress", "Step", "next_block", "next_steps", "units_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has been delivered since the start of the run."""

    steps: int = 0
    """Finished steps."""
    units: int = 0
    samples: int = 0
    digest: str = ""
    """Rolling digest of everything delivered, micro-step by micro-step, over all ranks."""

    def after(self, hashes: bytes, *, units: int, samples: int, ends_step: bool) -> Progress:
        """Go on by one micro-step on all ranks: the hashes of its units, in their order, and how many there are."""
        return Progress(
            steps=self.steps + ends_step,
            units=self.units + units,
            samples=self.samples + samples,
            digest=hashlib.blake2b(bytes.fromhex(self.digest) + hashes, digest_size=16).hexdigest(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """How far a block was delivered, and how it was dealt."""

    shape: StepShape
    balance: BalanceConfig
    steps_done: int
    micro_done: int
    """Micro-steps of the step after `steps_done`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Steps that were dealt together."""

    table: UnitTable
    shape: StepShape
    balance: BalanceConfig
    rows: str
    """How rows share a micro-batch: see `deal.py`."""
    before: Place
    after: Place

    is_cut: bool = False
    """Dealt in the order of the stream out of the first window alone: every step of it is a block of its own."""

    def deal(self) -> npt.NDArray[np.int64]:
        """Return [steps, micro, rank, row] of numbers in the table, -1 for fillers."""
        return deal(self.table, self.shape, self.balance, self.rows)

    def step(self, number: int) -> tuple[Place, int, Place | None]:
        """Return from which place on a step is dealt, how many are dealt before it, and the place behind it.

        The last is None where it is in the middle of the block.
        """
        end = (number + 1) * self.shape.units_per_step
        is_last = end >= len(self.table)
        if not self.is_cut:
            return self.before, number, self.after if is_last else None
        begin = end - self.shape.units_per_step
        return _without(self.before, begin), 0, self.after if is_last else _without(self.before, end)


def _without(place: Place, num_units: int) -> Place:
    """Return the place behind some of the units that are left of the first window."""
    return replace(place, left=(place.left[0][num_units:], *place.left[1:]))


def next_block(queue: UnitQueue, shape: StepShape, balance: BalanceConfig, rows: str) -> Block | None:
    """Take the units of the next block; None at the end of the stream."""
    return _take(queue, shape, balance, rows, balance.horizon)


def next_steps(queue: UnitQueue, shape: StepShape, balance: BalanceConfig, rows: str, max_steps: int) -> Block | None:
    """Take the next block; where each step would be one by itself, those that are planned already, up to a limit."""
    if balance.horizon == 1 and deals_in_order(shape, balance, rows):
        num_steps = min(max_steps, queue.num_at_hand() // shape.units_per_step)
        if num_steps > 1:
            return _take(queue, shape, balance, rows, num_steps, is_cut=True)
    return next_block(queue, shape, balance, rows)


def _take(
    queue: UnitQueue, shape: StepShape, balance: BalanceConfig, rows: str, num_steps: int, *, is_cut: bool = False
) -> Block | None:
    before = queue.place()
    table = queue.take(shape.units_per_step * num_steps)
    if table is None:
        return None
    after = queue.place()
    first, windows, left = table.windows[0], before.windows, before.left
    if not windows and first.start.window == before.cursor.window:
        windows, left = (first,), (np.arange(first.num_units),)
    # A state inside the block has to find the windows again that were planned for it.
    before = Place(cursor=before.cursor, windows=windows, left=left, planned=after.planned)
    return Block(table=table, shape=shape, balance=balance, rows=rows, before=before, after=after, is_cut=is_cut)


def units_at(table: UnitTable, numbers: npt.NDArray[np.int64], unit_per_cost: float) -> list[Unit]:
    """Build units of a table, all at once: single numbers come out of an array much more slowly."""
    tokens = table.tokens[numbers].tolist()
    llm, vit = ((costs[numbers] * unit_per_cost).tolist() for costs in (table.llm, table.vit))
    return list(map(Unit, refs_at(table, numbers), tokens, llm, vit))


def refs_at(table: UnitTable, numbers: npt.NDArray[np.int64]) -> list[tuple[Ref, ...]]:
    """Return the samples of units of a table."""
    units = table.unit[numbers]
    if len(table.windows) == 1:
        return _refs_of(table.windows[0], units)
    refs: list[tuple[Ref, ...]] = [()] * len(numbers)
    for place, window in enumerate(table.windows):
        here = np.flatnonzero(table.window[numbers] == place)
        for number, own in zip(here.tolist(), _refs_of(window, units[here]), strict=True):
            refs[number] = own
    return refs


def _refs_of(window: Window, units: npt.NDArray[np.int64]) -> list[tuple[Ref, ...]]:
    if window.num_units == len(window.samples):  # each is a single sample
        return list(zip(make_tuples(Ref, window.samples.refs[units].tolist()), strict=True))
    samples, splits = take_rows(window.splits, units)
    refs = tuple(make_tuples(Ref, window.samples.refs[samples].tolist()))
    return [refs[begin:end] for begin, end in itertools.pairwise(splits.tolist())]


class _Dealt:
    """A block with who gets what, shared by its steps: what they are asked for is looked up for all of them at once."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.grid = block.deal()  # [steps, micro, rank, row]
        self._of_rank: dict[int, tuple[list[tuple[Ref, ...]], list[list[int]]]] = {}

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """[steps, micro, rank] How many labels each micro-batch has; below 0: unknown."""
        return np.asarray(np.where(self.grid >= 0, self.block.table.labels[self.grid], 0).sum(axis=3))

    def of_rank(self, rank: int) -> tuple[list[tuple[Ref, ...]], list[list[int]]]:
        """Return [steps * micro * row] the refs of each row, and [steps, micro] tokens, of one rank."""
        found = self._of_rank.get(rank)
        if found is None:
            table, numbers = self.block.table, self.grid[:, :, rank]
            real = numbers >= 0
            refs = refs_at(table, numbers[real])
            if len(refs) < numbers.size:
                given = iter(refs)
                refs = [next(given) if is_real else () for is_real in real.ravel().tolist()]
            tokens = np.where(real, table.tokens[numbers], 0).sum(axis=2)
            found = self._of_rank[rank] = refs, tokens.tolist()
        return found


class Step:
    """What all ranks consume between two updates of the weights."""

    def __init__(
        self,
        dealt: _Dealt,
        number: int,
        progress: list[Progress],
        encode: Callable[[Place, Progress, Partial | None], dict[str, Any]],
        *,
        epoch: int,
    ) -> None:
        """Bind a block's step to the progress before each of its remaining micro-steps (and after the last)."""
        block = dealt.block
        self._dealt = dealt
        self._block = block
        self._grid: npt.NDArray[np.int64] = dealt.grid[number]  # [micro, rank, row]
        self._number = number
        self._progress = progress
        self._encode = encode
        self.index = progress[0].steps
        """Number of the step since the start of the run; goes on over a resume. What is left of a step that was
        interrupted and dealt anew for another shape begins with that step's number."""
        self.epoch = epoch
        """Epoch of the mixture in which the step's first unit was drawn."""
        self.micro_begin = block.shape.micro_batches - (len(progress) - 1)
        """First micro-step that is still to be delivered: above 0 only right after a resume inside a step."""
        self.dropped: tuple[Dropped, ...] = block.table.dropped if number == 0 else ()
        """Samples that the plan left out or shortened where this step's units were cut."""

    @property
    def shape(self) -> StepShape:
        """Return the shape that the step was dealt for."""
        return self._block.shape

    @property
    def table(self) -> UnitTable:
        """Return the units that `numbers` counts."""
        return self._block.table

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return [micro, rank, row] of numbers in `table`; -1 for fillers."""
        return self._grid

    def units(self, rank: int, micro: int) -> tuple[Unit | None, ...]:
        """Return the rows of one micro-batch; None is a filler row without labels."""
        numbers = self._grid[micro, rank]
        units = iter(units_at(self._block.table, numbers[numbers >= 0], 1.0 / self._block.balance.costs.scale))
        return tuple(None if number < 0 else next(units) for number in numbers.tolist())

    def refs(self, rank: int, micro: int) -> list[tuple[Ref, ...]]:
        """Return the samples of the rows of one micro-batch; a filler row has none."""
        refs, _ = self._dealt.of_rank(rank)
        shape = self._block.shape
        begin = (self._number * shape.micro_batches + micro) * shape.batch_size
        return refs[begin : begin + shape.batch_size]

    def tokens(self, rank: int, micro: int) -> int:
        """Return how many tokens the rows of one micro-batch hold."""
        _, tokens = self._dealt.of_rank(rank)
        return tokens[self._number][micro]

    @property
    def total_labels(self) -> int | None:
        """Return how many tokens are learned in the step, over all its ranks and micro-batches.

        Also those before `micro_begin`. None: one of its samples has no count, or was cut.
        """
        count = int(self._dealt.labels[self._number].sum())
        return count if count >= 0 else None

    def labels(self, rank: int, micro: int) -> int | None:
        """Return how many tokens of one micro-batch are learned; None: unknown for one of its samples."""
        count = int(self._dealt.labels[self._number, micro, rank])
        return count if count >= 0 else None

    def state_after(self, micro: int | None = None) -> dict[str, Any]:
        """Return the state once all ranks have consumed the step up to and with that micro-step (all by default)."""
        last = self._block.shape.micro_batches - 1
        micro = last if micro is None else micro
        progress = self._progress[micro - self.micro_begin + 1]
        before, steps_before, after = self._block.step(self._number)
        if micro == last and after is not None:
            return self._encode(after, progress, None)
        partial = Partial(
            shape=self._block.shape,
            balance=self._block.balance,
            steps_done=steps_before + (micro == last),
            micro_done=0 if micro == last else micro + 1,
        )
        return self._encode(before, progress, partial)


def steps_of(
    block: Block,
    start: Progress,
    encode: Callable[[Place, Progress, Partial | None], dict[str, Any]],
    epoch: int,
    done: tuple[int, int] = (0, 0),
) -> tuple[list[Step], Progress]:
    """Cut a dealt block into steps, from (steps, micro-steps) `done` on; return them and the progress behind them."""
    dealt = _Dealt(block)
    micro_batches = block.shape.micro_batches
    flat = dealt.grid.reshape(-1, block.shape.world_size * block.shape.batch_size)  # [micro-steps, unit]
    delivered = _deliveries(block.table, flat[done[0] * micro_batches + done[1] :])
    steps = []
    for number in range(done[0], len(dealt.grid)):
        progress = [start]
        for micro in range(done[1] if number == done[0] else 0, micro_batches):
            hashes, units, samples = next(delivered)
            ends = micro == micro_batches - 1
            progress.append(progress[-1].after(hashes, units=units, samples=samples, ends_step=ends))
        start = progress[-1]
        steps.append(Step(dealt, number, progress, encode, epoch=epoch))
    return steps, start


def _deliveries(table: UnitTable, numbers: npt.NDArray[np.int64]) -> Iterator[tuple[bytes, int, int]]:
    """Yield what [micro-steps, unit] deliver: the hashes of their units, how many these are, and their samples."""
    real = numbers >= 0
    units = numbers[real]
    hashes = table.hashes[units].astype("<u8", copy=False)
    ends = np.concatenate([[0], np.cumsum(real.sum(axis=1))])
    samples = np.concatenate([[0], np.cumsum(table.num_samples[units])])[ends]
    counts = zip(np.diff(ends).tolist(), np.diff(samples).tolist(), strict=True)
    for (begin, end), (num_units, num_samples) in zip(itertools.pairwise(ends.tolist()), counts, strict=True):
        yield hashes[begin:end].tobytes(), num_units, num_samples
