"""Equal shares of two costs: items -> parts of equal size.

Enters: two costs per item, in whole numbers. Leaves: [parts, size] of item numbers. Equal-size Karmarkar-Karp
(differencing of tuples: each round joins the two most uneven, largest with smallest) on the sum of both costs, then
swaps between the worst part and others for as long as the worst of all shares, of either cost, goes down. Whole
numbers make every rank come to the same result.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.plan.costs import CostConfig

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["BalanceConfig", "equal_parts", "relative_costs", "swap_until_even"]

_BARRIERS = ("micro", "none", "step")
_MEAN = 1 << 20  # the mean share of a part, in whole numbers
_CLOSE = _MEAN + _MEAN // 200  # 0.5 % above the mean: even enough to stop
_PARTNERS = 256  # items that are tried as partners in one round of swaps


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """How units are dealt to ranks. It never changes the unit stream, only who gets what within a step."""

    barrier: str = "step"
    """Where ranks wait for each other: once a `step` (DDP with accumulation), at every `micro`-step (FSDP), or `none`:
    deal in the order of the stream."""
    horizon: int = 1
    """Steps that are dealt together: more of them even out ranks that have one micro-batch a step, and make steps
    differ from each other."""
    small_ends: bool = False
    """Order the micro-batches of a step so that the cheapest stand at both ends, for pipeline schedules."""
    costs: CostConfig = field(default_factory=CostConfig)

    def __post_init__(self) -> None:
        """Refuse unknown barriers."""
        if self.barrier not in _BARRIERS:
            raise ConfigError(
                f"balance.barrier={self.barrier!r} means nothing: {nearest_name(self.barrier, _BARRIERS)}"
            )
        if self.horizon < 1:
            raise ConfigError(f"balance.horizon={self.horizon} deals nothing. Give 1 or more steps.")


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
