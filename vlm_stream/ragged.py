"""Rows of different lengths in one array: row r owns the entries `splits[r]:splits[r + 1]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["entries_of", "take_rows"]


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


def entries_of(splits: Ints, rows: Ints) -> Ints | slice:
    """Return the entries of some rows, row after row: as a slice where they lie so already, which is taken at once.

    >>> entries_of(np.array([0, 2, 3, 6]), np.array([1, 2]))
    slice(2, 6, None)
    >>> entries_of(np.array([0, 2, 3, 6]), np.array([2, 0]))
    array([3, 4, 5, 0, 1])
    """
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return slice(int(splits[rows[0]]), int(splits[rows[-1] + 1]))
    return take_rows(splits, rows)[0]
