"""Samples of similar length side by side, for batches that are padded and not packed.

Enters: lengths of a window, longest first. Leaves: where groups end, and in which order blocks of them are delivered.
In a stream grouped by count the unit stays the single sample: a micro-batch is any number of neighbours, so the batch
size may change at a resume. Only a padded-token budget makes the group itself the unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.errors import ConfigError
from vlm_stream.plan.pack import check_long
from vlm_stream.plan.randomness import Key, permutation

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["GroupConfig", "PlainConfig", "budget_groups", "permute_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig:
    """Single samples in the order of the mixture."""

    max_tokens: int | None = None
    """Longest sample that is delivered."""
    long_samples: str = "drop"
    """What happens to longer ones: `drop`, `truncate` or `raise`."""

    def __post_init__(self) -> None:
        """Refuse unknown rules."""
        check_long(self.long_samples)
        _at_least_one("max_tokens", self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Samples sorted by length inside each window, delivered in permuted blocks."""

    block_units: int = 256
    """Neighbours in length that stay together: at least the units of a step, or its ranks meet two lengths. It is part
    of the stream, so it does not follow the world size."""
    token_budget: int | None = None
    """Rows x longest row of a group at most; None: group by count, and the batch size decides."""
    max_tokens: int | None = None
    """Longest sample that is delivered; with a budget, the budget by default."""
    long_samples: str = "drop"
    """What happens to longer ones: `drop`, `truncate` or `raise`."""
    carry_windows: int = 4
    """Windows through which the last, unfilled group of a budget may be carried."""

    def __post_init__(self) -> None:
        """Refuse groups that can hold nothing."""
        check_long(self.long_samples)
        for name in ("block_units", "token_budget", "max_tokens"):
            _at_least_one(name, getattr(self, name))
        if self.token_budget is not None:
            limit = self.token_budget if self.max_tokens is None else min(self.max_tokens, self.token_budget)
            object.__setattr__(self, "max_tokens", limit)


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"mode.{name} is {value}; no unit could hold a sample. Give 1 or more.")


def budget_groups(lengths: Ints, budget: int) -> tuple[Ints, int]:
    """Cut lengths, longest first, into groups of rows x longest row <= budget.

    Returns:
        [groups + 1] Where groups begin and end, and the number of groups that took all they could.

    >>> budget_groups(np.array([6, 5, 4, 4, 3]), 12)
    (array([0, 2, 5]), 2)
    """
    splits = [0]
    begin, num = 0, len(lengths)
    num_full = 0
    while begin < num:
        rows = budget // max(int(lengths[begin]), 1)
        end = min(begin + rows, num)
        num_full += end - begin == rows
        splits.append(end)
        begin = end
    return np.asarray(splits, dtype=np.int64), num_full


def permute_blocks(num_units: int, block_units: int, key: Key | None) -> Ints:
    """Return [num_units] the units in permuted blocks of neighbours; as they are without a key."""
    if key is None:
        return np.arange(num_units)
    num_blocks = -(-num_units // block_units)
    begins = permutation(key, num_blocks) * block_units
    order = (begins[:, None] + np.arange(block_units)[None, :]).ravel()  # [num_blocks * block_units]
    return order[order < num_units]
