"""Ascending numbers in few: places of keyframes become a first one and steps, as an index holds them."""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


def pack_steps(places: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return ascending numbers as the first of them, then pairs: a step, and how many times it is taken.

    >>> pack_steps([0, 50, 100, 150, 160]).tolist()
    [0, 50, 3, 10, 1]
    """
    steps = np.diff(np.asarray(places, np.int64))
    begins = np.flatnonzero(np.diff(steps, prepend=0))
    times = np.diff(begins, append=len(steps))
    pairs = np.stack([steps[begins], times], axis=1).ravel()
    return np.concatenate([np.asarray(places[:1], np.int64), pairs]).astype(np.int32)


def unpack_steps(packed: npt.NDArray[np.int32], total: int) -> list[int]:
    """Return the numbers that `pack_steps` was given.

    Raises:
        DatasetError: They are not ascending numbers below the total.
    """
    first, steps, times = (packed[at].astype(np.int64) for at in (slice(1), slice(1, None, 2), slice(2, None, 2)))
    is_right = len(steps) == len(times) and not (first < 0).any() and min([*steps, *times, 1]) > 0
    if not is_right or sum(first.tolist()) + sum(map(mul, steps.tolist(), times.tolist())) >= max(total, 1):
        raise DatasetError(
            f"an index tells of keyframes that a clip of {total} frames cannot have: it was damaged or made by "
            f"something else. Write it again with: vlm-stream index"
        )
    places: list[int] = np.cumsum(np.concatenate([first, np.repeat(steps, times)])).tolist()
    return places


def as_objects(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.object_]:
    """Return arrays of several lengths as an array of arrays."""
    found = np.empty(len(arrays), object)
    for place, array in enumerate(arrays):
        found[place] = array
    return found
