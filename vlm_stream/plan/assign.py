"""The units of a few steps -> who gets which, and when.

Enters: costs of n units, the shape of a step, the barrier. Leaves: [steps, micro, rank, row] of unit numbers, -1 for a
filler. A pure function of its arguments in whole numbers: every rank computes the same.

Equal parts are made by equal-size Karmarkar-Karp (differencing of tuples: each round joins the two most uneven, largest
with smallest) on the sum of both costs, then by swaps between the worst part and others for as long as the worst of
all shares, of either cost, goes down.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.plan.config import BalanceConfig, RowPolicy, StepShape
    from vlm_stream.plan.queue import UnitTable

    Ints = npt.NDArray[np.int64]

__all__ = ["assign", "equal_parts", "relative_costs", "swap_until_even"]

_MEAN = 1 << 20  # the mean share of a part, in whole numbers
_CLOSE = _MEAN + _MEAN // 200  # 0.5 % above the mean: even enough to stop
_PARTNERS = 256  # items that are tried as partners in one round of swaps
_SWAPS_PER_PART = 2


def assign(table: UnitTable, shape: StepShape, balance: BalanceConfig, policy: RowPolicy) -> Ints:
    """Assign n units to `ceil(n / units_per_step)` steps."""
    num_steps = -(-len(table) // shape.units_per_step)
    numbers = np.arange(num_steps * shape.units_per_step)
    numbers[len(table) :] = -1
    if _in_order(shape, balance, policy):
        return numbers.reshape(num_steps, shape.micro_batches, shape.world_size, shape.batch_size)
    if policy == "free" or shape.batch_size == 1:
        llm, vit, hashes = _padded(table.llm, numbers), _padded(table.vit, numbers), _padded(table.hashes, numbers)
        return numbers[_assign_items(llm, vit, hashes, shape, balance)]
    if policy == "sorted":
        numbers[: len(table)] = np.argsort(-table.tokens, kind="stable")
    batches = numbers.reshape(-1, shape.batch_size)  # [c, row] micro-batches that stay together
    llm = _padded(table.llm, batches).max(axis=1) * shape.batch_size  # padding makes every row as long as the longest
    vit = _padded(table.vit, batches).sum(axis=1)
    hashes = _padded(table.hashes, batches[:, 0])
    grid = _assign_items(llm, vit, hashes, replace(shape, batch_size=1), balance)
    return batches[grid[..., 0]]


def _padded(values: npt.NDArray[np.generic], numbers: Ints) -> Ints:
    """Return the values of units, 0 for fillers."""
    out = np.zeros(numbers.shape, dtype=values.dtype)
    real = numbers >= 0
    out[real] = values[numbers[real]]
    return out


def _assign_items(llm: Ints, vit: Ints, hashes: Ints, shape: StepShape, balance: BalanceConfig) -> Ints:
    """Assign items that fill the steps exactly; return [steps, micro, rank, row] of item numbers."""
    num_steps = len(llm) // shape.units_per_step
    if balance.barrier == "step" and shape.micro_batches * shape.batch_size > 1:
        grid = _even_steps(llm, vit, shape, num_steps)
    else:
        grid = _even_columns(llm, vit, shape, num_steps)
    # In an order that has nothing to do with cost, so that no step and no run of steps is a curriculum.
    grid = grid[np.argsort(hashes[grid[:, 0, 0, 0]], kind="stable")]
    by = np.argsort(hashes[grid[:, :, 0, 0]], axis=1, kind="stable")  # [steps, micro]
    return np.take_along_axis(grid, by[:, :, None, None], axis=1)


def _even_steps(llm: Ints, vit: Ints, shape: StepShape, num_steps: int) -> Ints:
    """For a barrier once a step: parts of equal cost, one for each rank and step; similar parts share a step."""
    num_parts = num_steps * shape.world_size
    first, second = relative_costs(llm, num_parts), relative_costs(vit, num_parts)
    parts = equal_parts(first + second, num_parts)
    parts = swap_until_even(parts, first, second, _SWAPS_PER_PART * num_parts)
    total = llm + vit
    parts = parts[np.argsort(-total[parts].sum(axis=1), kind="stable")]
    # Dearest first, given to micro-batches forth and back: the micro-batches of all ranks are similar too.
    order = np.argsort(-total[parts], axis=1, kind="stable")
    parts = np.take_along_axis(parts, order, axis=1).reshape(num_parts, shape.batch_size, shape.micro_batches)
    parts[:, 1::2] = parts[:, 1::2, ::-1]
    grid = parts.reshape(num_steps, shape.world_size, shape.batch_size, shape.micro_batches)
    return grid.transpose(0, 3, 1, 2).copy()


def _even_columns(llm: Ints, vit: Ints, shape: StepShape, num_steps: int) -> Ints:
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


def _in_order(shape: StepShape, balance: BalanceConfig, policy: RowPolicy) -> bool:
    """Return whether units are assigned as they come."""
    return balance.barrier == "none" or (shape.world_size == 1 and policy == "stream")


def relative_costs(costs: Ints, num_parts: int) -> Ints:
    """Scale costs so that the mean share of a part is `_MEAN`; all zero when there is no cost."""
    total = int(costs.sum())
    if not total:
        return np.zeros(len(costs), dtype=np.int64)
    return np.rint(costs.astype(np.float64) * (_MEAN * num_parts / total)).astype(np.int64)


def equal_parts(costs: Ints, num_parts: int) -> Ints:
    """Cut `num_parts * size` items into parts of equal size and similar cost.

    Returns:
        [num_parts, size] item numbers.

    >>> parts = equal_parts(np.array([8, 7, 6, 5, 4, 2]), 2)
    >>> sorted(np.array([8, 7, 6, 5, 4, 2])[parts].sum(axis=1).tolist())
    [16, 16]
    """
    size = len(costs) // num_parts
    tuples = np.argsort(-costs, kind="stable").reshape(size, num_parts)  # each gives one item to every part
    heap = []
    for number in range(size):
        sums = costs[tuples[number]]  # [num_parts] descending
        heap.append((int(sums[-1] - sums[0]), number, sums, tuples[number][:, None]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, sums, members = heapq.heappop(heap)
        _, _, other_sums, other_members = heapq.heappop(heap)
        sums = sums + other_sums[::-1]
        members = np.concatenate([members, other_members[::-1]], axis=1)
        order = np.argsort(-sums, kind="stable")
        sums, members = sums[order], members[order]
        heapq.heappush(heap, (int(sums[-1] - sums[0]), number, sums, members))
    return np.asarray(heap[0][3])


def swap_until_even(parts: Ints, first: Ints, second: Ints, max_rounds: int) -> Ints:
    """Swap items between parts to lower the largest share of either cost.

    Args:
        parts: [k, size] Item numbers.
        first: [n] Relative costs.
        second: [n] Relative costs of the other kind.
        max_rounds: Most swaps.
    """
    parts = parts.copy()
    num_parts, size = parts.shape
    costs = np.stack([first, second])  # [2, n]
    loads = costs[:, parts].sum(axis=2)  # [2, k]
    num_partners = min(num_parts - 1, max(_PARTNERS // size, 16))
    for _ in range(max_rounds if num_parts > 1 else 0):
        kind, worst = divmod(int(np.argmax(loads)), num_parts)
        peak = int(loads[kind, worst])
        if peak <= _CLOSE:
            break
        partners = np.argsort(loads[kind], kind="stable")[:num_partners]
        partners = partners[partners != worst]
        mine = costs[:, parts[worst]]  # [2, size]
        theirs = costs[:, parts[partners]].reshape(2, -1)  # [2, p * size]
        gain = mine[:, :, None] - theirs[:, None, :]  # [2, size, p * size] what the worst part gives away
        after_mine = loads[:, worst][:, None, None] - gain
        after_theirs = np.repeat(loads[:, partners], size, axis=1)[:, None, :] + gain
        score = np.maximum(after_mine, after_theirs).max(axis=0)  # [size, p * size]
        best = int(np.argmin(score))
        if int(score.flat[best]) >= peak:
            break
        slot, column = divmod(best, score.shape[1])
        partner, other_slot = int(partners[column // size]), column % size
        loads[:, worst] -= gain[:, slot, column]
        loads[:, partner] += gain[:, slot, column]
        parts[worst, slot], parts[partner, other_slot] = parts[partner, other_slot], parts[worst, slot]
    return parts
