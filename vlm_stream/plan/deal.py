"""The units of a few steps -> who gets which, and when.

Enters: costs of n units, the shape of a step, the barrier. Leaves: [steps, micro, rank, row] of unit numbers, -1 for a
filler. A pure function of its arguments in whole numbers: every rank computes the same deal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.plan.balance import BalanceConfig
    from vlm_stream.plan.queue import UnitTable
    from vlm_stream.plan.values import StepShape

    Ints = npt.NDArray[np.int64]

__all__ = ["deal"]


def deal(table: UnitTable, shape: StepShape, balance: BalanceConfig) -> Ints:
    """Deal n units to `ceil(n / units_per_step)` steps."""
    num_steps = -(-len(table) // shape.units_per_step)
    numbers = np.full(num_steps * shape.units_per_step, -1, dtype=np.int64)
    numbers[: len(table)] = np.arange(len(table))
    return numbers.reshape(num_steps, shape.micro_batches, shape.world_size, shape.batch_size)
