"""JSON lines -> spans: one pass over the bytes in chunks, without parsing anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.sources.spans import RecordSpans, SpanBuilder

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["scan_lines"]

_NEWLINE = ord("\n")
_BLANKS = b" \t\r"


def scan_lines(stream: BinaryIO, begin: int = 0, chunk_bytes: int = 1 << 20) -> RecordSpans:
    """Return the spans of all lines that are not blank, from byte `begin` on; memory is one chunk and the spans."""
    builder = SpanBuilder()
    stream.seek(begin)
    offset = begin  # of the chunk
    line_begin, line = begin, 1  # the line that the chunk begins in
    blank_so_far = True  # whether that line had only blanks in earlier chunks
    while chunk := stream.read(chunk_bytes):
        newlines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE)  # [k]
        if not len(newlines):
            blank_so_far = blank_so_far and not chunk.strip(_BLANKS)
            offset += len(chunk)
            continue
        ends = newlines + offset  # [k] a line's end is its newline
        begins = np.concatenate([[line_begin], ends[:-1] + 1])  # [k]
        filled = _filled(chunk, newlines)
        filled[0] = not blank_so_far or bool(chunk[: newlines[0]].strip(_BLANKS))
        lines = np.arange(line, line + len(ends))
        builder.add(begins[filled], ends[filled], lines[filled])
        offset += len(chunk)
        line += len(ends)
        line_begin = int(ends[-1]) + 1
        blank_so_far = not chunk[newlines[-1] + 1 :].strip(_BLANKS)
    if not blank_so_far:  # the last line has no newline
        builder.add(np.array([line_begin]), np.array([offset]), np.array([line]))
    return builder.build()


def _filled(
    chunk: bytes, newlines: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell for each line that ends in the chunk whether it is more than blanks ([k]; its entry 0 is not looked at)."""
    data = np.frombuffer(chunk, np.uint8)
    firsts = np.concatenate([[0], newlines[:-1] + 1])
    filled = firsts < newlines
    # Lines of JSON seldom begin with a blank, so only the few that do are looked at one by one.
    suspects = np.flatnonzero(filled & np.isin(data[firsts], np.frombuffer(_BLANKS, np.uint8)))
    for i in suspects.tolist():
        filled[i] = bool(chunk[firsts[i] : newlines[i]].strip(_BLANKS))
    return filled
