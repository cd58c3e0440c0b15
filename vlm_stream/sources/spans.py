"""Where each record lies in its file: three numbers per record, whatever a record's size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RecordSpans", "SpanBuilder"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordSpans:
    """The n records of one file, in file order."""

    begins: npt.NDArray[np.int64]
    """[n] Byte offset; blanks around a record may be inside its span."""
    sizes: npt.NDArray[np.integer]
    """[n] Bytes; uint32 unless a record is larger."""
    lines: npt.NDArray[np.integer]
    """[n] Line on which the record begins, from 1; uint32 unless there are more."""

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.begins)


class SpanBuilder:
    """Collects spans chunk by chunk, in their compact form."""

    def __init__(self) -> None:
        """Start empty."""
        self._parts: list[tuple[Ints, npt.NDArray[np.integer], npt.NDArray[np.integer]]] = []

    def add(self, begins: Ints, ends: Ints, lines: Ints) -> None:
        """Append records given by half-open byte ranges."""
        if len(begins):
            self._parts.append((begins, _compact(ends - begins), _compact(lines)))

    def build(self) -> RecordSpans:
        """Return everything added so far and forget it: each column is freed part by part while it is joined."""
        columns = [list(column) for column in zip(*self._parts, strict=True)] or [[], [], []]
        self._parts.clear()
        empty = np.zeros(0, np.int64)
        joined = []
        for column in columns:
            joined.append(np.concatenate(column) if column else empty)
            column.clear()
        return RecordSpans(begins=joined[0], sizes=joined[1], lines=joined[2])


def _compact(values: Ints) -> npt.NDArray[np.integer]:
    return values.astype(np.uint32) if values.max() < 2**32 else values
