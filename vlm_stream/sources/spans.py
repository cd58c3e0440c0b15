"""Where each record lies in its file: three numbers per record, 16 bytes together, whatever a record's size."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RecordSpans", "SpanBuilder"]


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
    """Collects spans chunk by chunk. Its columns grow in place: joining parts at the end would take memory twice."""

    def __init__(self) -> None:
        """Start empty."""
        self._begins = array("q")
        self._sizes = array("I")
        self._lines = array("I")

    def add(self, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], lines: npt.NDArray[np.int64]) -> None:
        """Append records given by half-open byte ranges."""
        self._begins = _extended(self._begins, begins)
        self._sizes = _extended(self._sizes, ends - begins)
        self._lines = _extended(self._lines, lines)

    def build(self) -> RecordSpans:
        """Return everything added so far; the builder must not be used after that."""
        return RecordSpans(begins=_view(self._begins), sizes=_view(self._sizes), lines=_view(self._lines))


def _extended(column: array[int], values: npt.NDArray[np.int64]) -> array[int]:
    """Return the column with the values behind it, wider if one of them does not fit."""
    if column.typecode == "I" and len(values) and values.max() >= 2**32:
        column = array("q", column)
    column.frombytes(values.astype(column.typecode).tobytes())
    return column


def _view(column: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(column, column.typecode) if column else np.zeros(0, np.int64)
