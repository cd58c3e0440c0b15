"""The units of a few steps -> who gets which, and when.

Enters: costs of n units, the shape of a step, the barrier. Leaves: [steps, micro, rank, row] of unit numbers, -1 for a
filler. A pure function of its arguments in whole numbers: every rank computes the same deal.

Rows of a micro-batch are `free` (packs: any may stand together), `sorted` (grouped samples: neighbours in length, or
padding grows) or in the order of the `stream` (plain samples: who stands together stays random).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.plan.balance import equal_parts, relative_costs, swap_until_even

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.plan.balance import BalanceConfig
    from vlm_stream.plan.queue import UnitTable
    from vlm_stream.plan.values import StepShape

    Ints = npt.NDArray[np.int64]

__all__ = ["deal", "deals_in_order"]

_SWAPS_PER_PART = 2


def deals_in_order(shape: StepShape, balance: BalanceConfig, rows: str) -> bool:
    """Return whether units are dealt as they come, so that how many steps are dealt together makes no difference."""
    return balance.barrier == "none" or (shape.world_size == 1 and rows == "stream")


def deal(table: UnitTable, shape: StepShape, balance: BalanceConfig, rows: str) -> Ints:
    """Deal n units to `ceil(n / units_per_step)` steps."""
    num_steps = -(-len(table) // shape.units_per_step)
    numbers = np.arange(num_steps * shape.units_per_step)
    numbers[len(table) :] = -1
    if deals_in_order(shape, balance, rows):
        return numbers.reshape(num_steps, shape.micro_batches, shape.world_size, shape.batch_size)
    if rows == "free" or shape.batch_size == 1:
        llm, vit, hashes = _padded(table.llm, numbers), _padded(table.vit, numbers), _padded(table.hashes, numbers)
        return numbers[_deal_items(llm, vit, hashes, shape, balance)]
    if rows == "sorted":
        numbers[: len(table)] = np.argsort(-table.tokens, kind="stable")
    batches = numbers.reshape(-1, shape.batch_size)  # [c, row] micro-batches that stay together
    llm = _padded(table.llm, batches).max(axis=1) * shape.batch_size  # padding makes every row as long as the longest
    vit = _padded(table.vit, batches).sum(axis=1)
    hashes = _padded(table.hashes, batches[:, 0])
    grid = _deal_items(llm, vit, hashes, replace(shape, batch_size=1), balance)
    return batches[grid[..., 0]]


def _padded(values: npt.NDArray[np.generic], numbers: Ints) -> Ints:
    """Return the values of units, 0 for fillers."""
    out = np.zeros(numbers.shape, dtype=values.dtype)
    real = numbers >= 0
    out[real] = values[numbers[real]]
    return out


def _deal_items(llm: Ints, vit: Ints, hashes: Ints, shape: StepShape, balance: BalanceConfig) -> Ints:
    """Deal items that fill the steps exactly; return [steps, micro, rank, row] of item numbers."""
    num_steps = len(llm) // shape.units_per_step
    if balance.barrier == "step" and shape.micro_batches * shape.batch_size > 1:
        grid = _deal_even_steps(llm, vit, shape, num_steps)
    else:
        grid = _deal_even_columns(llm, vit, shape, num_steps)
    # In an order that has nothing to do with cost, so that no step and no run of steps is a curriculum.
    grid = grid[np.argsort(hashes[grid[:, 0, 0, 0]], kind="stable")]
    totals = (llm + vit)[grid].sum(axis=(2, 3))  # [steps, micro]
    for step in range(num_steps):
        by = np.argsort(totals[step], kind="stable")
        if balance.small_ends:
            # Ascending costs 0 1 2 3 4 -> 0 2 4 3 1.
            by = np.concatenate([by[::2], by[1::2][::-1]])
        else:
            by = np.argsort(hashes[grid[step, :, 0, 0]], kind="stable")
        grid[step] = grid[step, by]
    return grid


def _deal_even_steps(llm: Ints, vit: Ints, shape: StepShape, num_steps: int) -> Ints:
    """For a barrier once a step: parts of equal cost, one for each rank and step; similar parts share a step."""
    num_parts = num_steps * shape.world_size
    first, second = relative_costs(llm, num_parts), relative_costs(vit, num_parts)
    parts = equal_parts(first + second, num_parts)
    parts = swap_until_even(parts, first, second, _SWAPS_PER_PART * num_parts)
    total = llm + vit
    parts = parts[np.argsort(-total[parts].sum(axis=1), kind="stable")]
    # Dearest first, dealt to micro-batches forth and back: the micro-batches of all ranks are similar too.
    order = np.argsort(-total[parts], axis=1, kind="stable")
    parts = np.take_along_axis(parts, order, axis=1).reshape(num_parts, shape.batch_size, shape.micro_batches)
    parts[:, 1::2] = parts[:, 1::2, ::-1]
    grid = parts.reshape(num_steps, shape.world_size, shape.batch_size, shape.micro_batches)
    return grid.transpose(0, 3, 1, 2).copy()


def _deal_even_columns(llm: Ints, vit: Ints, shape: StepShape, num_steps: int) -> Ints:
    """For a barrier at every micro-step: what all ranks do at the same time is neighbouring in cost."""
    total = llm + vit
    num_columns = num_steps * shape.micro_batches
    columns = np.argsort(-total, kind="stable").reshape(num_columns, shape.world_size * shape.batch_size)
    if shape.batch_size > 1:
        columns = np.stack([column[equal_parts(total[column], shape.world_size)] for column in columns])
    cells = columns.reshape(num_columns, shape.world_size, shape.batch_size)
    cells[1::2] = cells[1::2, ::-1]  # no rank gets the dearest of every column
    # Columns forth and back over the steps, so that steps are alike.
    spread = cells.reshape(shape.micro_batches, num_steps, shape.world_size, shape.batch_size)
    spread[1::2] = spread[1::2, ::-1]
    return spread.transpose(1, 0, 2, 3).copy()
