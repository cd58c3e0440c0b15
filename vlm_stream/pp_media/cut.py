"""Where a batch is cut, and which media rows belong to each cut.

Enters: batch size, number of micro-batches, how many media items each sample owns, how many rows each item owns.
Leaves: half-open row ranges, one per micro-batch. Knows no tensor names.

The batch is cut where `torch.distributed.pipelining` cuts it (`tensor_split`: 7 rows in 3 are 3, 2, 2), because media
cut anywhere else reach the micro-batch of another sample.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Counts", "MediaCutError", "Rows", "as_counts", "cut_rows", "microbatch_bounds", "owned_rows", "samples_own"]

Bounds: TypeAlias = "list[tuple[int, int]]"
Counts: TypeAlias = "torch.Tensor | Sequence[int]"
Rows: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"


class MediaCutError(ConfigError, ValueError):
    """Media rows of a batch cannot be given to its micro-batches without guessing."""


def microbatch_bounds(batch_size: int, n_microbatches: int) -> Bounds:
    """Return the half-open sample range of each micro-batch, as `torch.tensor_split` makes them.

    >>> microbatch_bounds(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    if n_microbatches < 1:
        raise MediaCutError(
            f"n_microbatches is {n_microbatches}, so there is nothing to cut media for; give at least 1."
        )
    if batch_size < n_microbatches:
        raise MediaCutError(
            f"A batch of {batch_size} rows cannot be cut into {n_microbatches} micro-batches: the pipeline schedule "
            f"would get fewer than it waits for. Use a batch size of at least {n_microbatches}."
        )
    small, rest = divmod(batch_size, n_microbatches)
    ends = list(accumulate(small + (1 if i < rest else 0) for i in range(n_microbatches)))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def as_counts(counts: Counts) -> list[int]:
    """Return counts as Python integers."""
    return [int(n) for n in (counts.tolist() if isinstance(counts, torch.Tensor) else counts)]


def samples_own(num_items: int, batch_size: int, counts: Counts | None, what: str) -> list[int]:
    """Return how many of `num_items` media items each sample owns.

    Without counts it is only known when there is one sample, or one item for each.
    """
    if counts is None:
        if batch_size == 1:
            return [num_items]
        if num_items == batch_size:
            return [1] * batch_size
        raise MediaCutError(
            f"VLM PP chunking cannot align {num_items} {what}s with {batch_size} samples: nothing says which sample "
            f"owns which. Let the collate function add n_{what}s_per_sample."
        )
    owned = as_counts(counts)
    if len(owned) != batch_size or sum(owned) != num_items or min(owned, default=0) < 0:
        raise MediaCutError(
            f"VLM PP chunking cannot align {num_items} {what}s with {batch_size} samples: n_{what}s_per_sample is "
            f"{owned} ({len(owned)} entries, sum {sum(owned)}), so some {what}s would reach the wrong micro-batch. "
            f"Make the counts match the media rows of the batch."
        )
    return owned


def owned_rows(num_rows: int, per_item: Sequence[Sequence[int]], what: str) -> list[int]:
    """Return how many of `num_rows` rows each item owns: the first proposal whose total is `num_rows`.

    Two proposals with the same total here are the same proposal (one row each, and grids of one patch each).
    """
    for proposal in per_item:
        if sum(proposal) == num_rows:
            return list(proposal)
    totals = " or ".join(str(sum(p)) for p in per_item)
    raise MediaCutError(
        f"VLM PP chunking cannot align {num_rows} pixel rows with {len(per_item[0])} {what}s, which would own {totals} "
        f"rows in total. The grid and the pixels of the batch do not belong together."
    )


def cut_rows(rows: Rows, sizes: Sequence[int], bounds: Bounds) -> list[Any]:
    """Return for each micro-batch the rows of its owners: owner `i` has `sizes[i]` rows, `bounds` are owner ranges."""
    starts = [0, *accumulate(sizes)]
    return [rows[starts[begin] : starts[end]] for begin, end in bounds]
