"""Rows of different lengths in one array: row r owns the entries `splits[r]:splits[r + 1]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["take_rows"]


def take_rows(splits: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the entries of some rows, row after row, and the splits of these.

    >>> take_rows(np.array([0, 2, 3, 6]), np.array([2, 0]))
    (array([3, 4, 5, 0, 1]), array([0, 3, 5]))
    """
    begins = splits[rows]
    sizes = splits[rows + 1] - begins
    taken = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(sizes, out=taken[1:])
    return np.arange(taken[-1]) + np.repeat(begins - taken[:-1], sizes), taken
