"""Decoded pictures in one array: each is put into its places as it comes, so that they are in memory once."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Frames = npt.NDArray[np.uint8]


class Sheet:
    """The pictures of some frames, in the order in which they are wanted; threads may put theirs side by side."""

    def __init__(self, wanted: Sequence[int], height: int, width: int) -> None:
        """Take memory for pictures of that size."""
        self.frames: Frames = np.empty((len(wanted), height, width, 3), np.uint8)
        """[wanted, height, width, 3]"""
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for place, index in enumerate(wanted):
            self._places[index].append(place)
        self._left = set(wanted)

    def put(self, index: int, picture: Frames) -> None:
        """Put a picture into its places, if it has any.

        Raises:
            ValueError: It has another size.
        """
        if picture.shape != self.frames.shape[1:]:
            height, width = self.frames.shape[1:3]
            raise ValueError(f"frame {index} has {picture.shape[1]}x{picture.shape[0]} pixels, not {width}x{height}")
        for place in self._places.get(index, ()):
            self.frames[place] = picture
        self._left.discard(index)

    @property
    def left(self) -> set[int]:
        """Return the frames that are wanted still."""
        return self._left
