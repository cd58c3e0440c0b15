"""Lengths -> bins of indices: the planner's best-fit decreasing, under the reference's names.

Enters: lengths, a capacity, perhaps visual tokens. Leaves: lists of indices. Every sample that fits is in exactly one
bin.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.plan import best_fit_decreasing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["greedy_knapsack", "greedy_knapsack_vt_balanced", "visual_load"]

logger = logging.getLogger(__name__)


def greedy_knapsack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Pack samples by best-fit decreasing.

    Args:
        lengths: `[n]` Tokens of each sample.
        max_length: Capacity of a bin. Samples above it are left out, and a warning counts them.

    Returns:
        Bins in the order in which they were opened; their members longest first.

    >>> greedy_knapsack([3, 2, 4, 1], 5)
    [[2, 3], [0, 1]]
    """
    return _pack(np.asarray(lengths, dtype=np.int64), max_length)


def greedy_knapsack_vt_balanced(
    lengths: Sequence[int], max_length: int, visual_tokens: Sequence[int]
) -> list[list[int]]:
    """Pack samples, then put bins of similar visual load side by side.

    Ranks that take neighbouring bins in the same step then run their vision towers for about the same time. The order
    is ascending; `BalancedPackSampler` shuffles it without pulling neighbours apart.

    Args:
        lengths: `[n]` Tokens of each sample, media included.
        max_length: Capacity of a bin.
        visual_tokens: `[n]` Media tokens of each sample.

    Returns:
        The bins of `greedy_knapsack`, by ascending visual tokens.
    """
    bins = greedy_knapsack(lengths, max_length)
    loads = visual_load(bins, visual_tokens)
    if len(bins):
        logger.info(
            "Visual tokens per pack: mean %.1f, spread %.1f, min %d, max %d.",
            loads.mean(),
            loads.std(),
            loads.min(),
            loads.max(),
        )
    return [bins[i] for i in np.argsort(loads, kind="stable")]


def visual_load(
    bins: Sequence[Sequence[int]], visual_tokens: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return `[bins]` the visual tokens of each bin."""
    return np.asarray([sum(int(visual_tokens[i]) for i in members) for members in bins], dtype=np.int64)


def _pack(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], capacity: int) -> list[list[int]]:
    fits = np.flatnonzero(lengths <= capacity)
    if len(fits) < len(lengths):
        logger.warning(
            "%d of %d samples are longer than the capacity of %d tokens and are in no pack.",
            len(lengths) - len(fits),
            len(lengths),
            capacity,
        )
    if not len(fits):
        return []
    packs = best_fit_decreasing(lengths[fits], capacity)
    bins: list[list[int]] = [[] for _ in range(int(packs.max()) + 1)]
    for i in np.argsort(-lengths[fits], kind="stable"):
        bins[packs[i]].append(int(fits[i]))
    return bins
