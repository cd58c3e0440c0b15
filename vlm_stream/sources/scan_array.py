"""A JSON array -> the spans of its elements: one pass over the bytes in chunks, without parsing anything.

Only quotes, brackets and commas matter. They are found for a whole chunk at once; all else is arithmetic on positions:

    [{"a": "x,]"}, 7]      quotes pair up, so `,]` lies inside a string and is no structure
    1 2         1     0    depth after each bracket outside strings; commas at depth 1 separate elements

Whether an element is well-formed JSON shows when it is read; here only the array's own structure must hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import SourceError
from vlm_stream.sources.spans import RecordSpans, SpanBuilder

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["scan_array"]

_QUOTE, _COMMA, _BACKSLASH, _NEWLINE = b'",\\\n'
_CASE, _OPEN, _CLOSE = 0xDF, 0x5B, 0x5D  # without bit 5, `{` and `[` are one value, `}` and `]` another
_BLANKS = b" \t\r\n"


def scan_array(stream: BinaryIO, name: str, begin: int = 0, chunk_bytes: int = 1 << 20) -> RecordSpans:
    """Return the spans of the array's elements; `begin` is the offset of its opening bracket or of blanks before it.

    Raises:
        SourceError: The array does not end, or something follows it: its records cannot be told apart.
    """
    stream.seek(begin)
    scan = _Scan(name, begin)
    left_over = b""  # backslashes at the end of a chunk: what they escape is in the next one
    while chunk := stream.read(chunk_bytes):
        chunk = left_over + chunk
        body = chunk.rstrip(b"\\")
        left_over = chunk[len(body) :]
        scan.feed(body)
    scan.feed(left_over)
    spans = scan.finish()
    if len(spans) == 1 and _is_blank(stream, int(spans.begins[0]), int(spans.sizes[0])):
        return SpanBuilder().build()  # `[]` has two brackets and no element between them
    return spans


def _is_blank(stream: BinaryIO, begin: int, size_bytes: int) -> bool:
    stream.seek(begin)
    while size_bytes > 0 and (piece := stream.read(min(size_bytes, 1 << 16))):
        if piece.strip(_BLANKS):
            return False
        size_bytes -= len(piece)
    return True


class _Scan:
    """The state between chunks."""

    def __init__(self, name: str, begin: int) -> None:
        self.name = name
        self.offset = begin  # of the next chunk
        self.depth = 0
        self.in_string = False
        self.line = 1
        self.element_begin = -1  # just after the separator before the element
        self.element_line = 0  # 0: not known yet, the element's first mark is in a later chunk
        self.num_elements = 0
        self.closed_at = -1  # offset just after the array's closing bracket
        self.builder = SpanBuilder()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        if not chunk:
            return
        if self.closed_at >= 0:
            self._refuse_tail(chunk, self.offset)
            return
        data = np.frombuffer(chunk, np.uint8)
        folded = data & _CASE
        at = np.flatnonzero((data == _QUOTE) | (data == _COMMA) | (folded == _OPEN) | (folded == _CLOSE))  # [m] marks
        byte, folded = data[at], folded[at]  # [m]
        quotes = _real_quotes(data, at, byte == _QUOTE)
        inside = np.logical_xor.accumulate(quotes) ^ self.in_string  # [m] after the mark
        step = (folded == _OPEN).astype(np.int8) - (folded == _CLOSE)
        step[inside] = 0
        depth = self.depth + np.cumsum(step, dtype=np.int32)  # [m] after the mark
        ends = np.flatnonzero((depth <= 0) & (step < 0))
        num_marks = int(ends[0]) + 1 if len(ends) else len(at)  # nothing after the closing bracket is structure
        if len(ends):
            self._close_array(chunk, int(at[num_marks - 1]))
        cuts = ~inside & (byte == _COMMA) & (depth == 1) | (step > 0) & (depth == 1) | (step < 0) & (depth == 0)
        newlines = np.flatnonzero(data == _NEWLINE)
        self._close_elements(np.flatnonzero(cuts[:num_marks]), at[:num_marks], newlines)
        if len(at):
            self.depth = int(depth[-1])
            self.in_string = bool(inside[-1])
        self.line += len(newlines)
        self.offset += len(chunk)
        if self.closed_at >= 0:
            self._refuse_tail(chunk[len(chunk) - (self.offset - self.closed_at) :], self.closed_at)

    def _close_array(self, chunk: bytes, position: int) -> None:
        self.closed_at = self.offset + position + 1
        if chunk[position] != ord("]"):
            self._refuse_tail(chunk[position:], self.closed_at)

    def _close_elements(
        self, cuts: npt.NDArray[np.int64], at: npt.NDArray[np.int64], newlines: npt.NDArray[np.int64]
    ) -> None:
        """Add the elements that end at a separator of this chunk; `cuts` are indices of the separators in `at`."""
        if self.element_begin >= 0 and not self.element_line and len(at):
            self.element_line = self.line + int(np.searchsorted(newlines, at[0]))
        if not len(cuts):
            return
        ends = at[cuts] + self.offset  # [c] a separator ends one element and begins the next
        begins = np.concatenate([[self.element_begin], ends[:-1] + 1])
        # An element's first mark tells its line, not its separator: blanks between them may hold newlines.
        first_marks = np.minimum(cuts + 1, len(at) - 1)
        lines = self.line + np.searchsorted(newlines, at[first_marks])  # [c] of the elements that begin
        begin_lines = np.concatenate([[self.element_line], lines[:-1]])
        skip = 1 if self.element_begin < 0 else 0  # the opening bracket ends nothing
        self.builder.add(begins[skip:], ends[skip:], begin_lines[skip:])
        self.num_elements += len(cuts) - skip
        self.element_begin = int(ends[-1]) + 1
        self.element_line = int(lines[-1]) if cuts[-1] + 1 < len(at) else 0

    def _refuse_tail(self, tail: bytes, offset: int) -> None:
        if tail.strip(_BLANKS):
            raise SourceError(
                f"{self.name}: the array ends near byte {offset:,} (line {self.line}), after {self.num_elements:,} "
                "records, and more follows, so a bracket is closed twice or files were glued together; nothing after "
                "it can be read. Mend the file, or write one record per line (.jsonl)."
            )

    def finish(self) -> RecordSpans:
        """Return the spans once all bytes were fed."""
        if self.closed_at < 0:
            state = "inside a string" if self.in_string else f"{self.depth} brackets deep"
            raise SourceError(
                f"{self.name}: the array does not end: the file stops {state}, in record {self.num_elements} that "
                f"begins on line {self.element_line or self.line}, so it is cut off or a bracket or quote is missing "
                "there. Mend the file, or write one record per line (.jsonl)."
            )
        return self.builder.build()


def _real_quotes(
    data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], quotes: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    r"""Return which marks are quotes that no odd run of backslashes escapes (`\"`, `\\\"`); `quotes` is changed."""
    suspects = np.flatnonzero(quotes)
    suspects = suspects[(at[suspects] > 0) & (data[at[suspects] - 1] == _BACKSLASH)]
    back = 1  # so many backslashes stand before each suspect
    while len(suspects):
        quotes[suspects] = back % 2 == 0
        back += 1
        suspects = suspects[at[suspects] >= back]
        suspects = suspects[data[at[suspects] - back] == _BACKSLASH]
    return quotes
