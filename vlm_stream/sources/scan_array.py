"""A JSON array -> the spans of its elements: one pass over the bytes in chunks, without parsing anything.

Only six kinds of bytes matter: quotes and the backslashes that escape them, brackets, commas, newlines. They are found
for a whole chunk at once; everything after that is arithmetic on their positions:

    [{"a": "x,]"}, 7]      quotes pair up, so `,]` lies inside a string and is no structure
    1 2         2 1 0      depth after each bracket outside strings; commas at depth 1 separate elements

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

_QUOTE, _BACKSLASH, _OPEN, _CLOSE, _COMMA, _NEWLINE = range(1, 7)
_KINDS = bytes.maketrans(
    bytes(range(256)),
    bytes(
        {34: _QUOTE, 92: _BACKSLASH, 91: _OPEN, 123: _OPEN, 93: _CLOSE, 125: _CLOSE, 44: _COMMA, 10: _NEWLINE}.get(b, 0)
        for b in range(256)
    ),
)
_DEPTH = np.zeros(7, np.int64)
_DEPTH[_OPEN], _DEPTH[_CLOSE] = 1, -1
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
        kinds = np.frombuffer(chunk.translate(_KINDS), np.uint8)
        at = np.flatnonzero(kinds)  # [m] positions of the marks
        kind = kinds[at]  # [m]
        lines = self.line + np.cumsum(kind == _NEWLINE)  # [m]
        keep = _without_escaped(at, kind) if b'\\"' in chunk else kind != _BACKSLASH
        keep &= kind != _NEWLINE
        at, kind, lines = at[keep], kind[keep], lines[keep]

        quotes = kind == _QUOTE
        inside = (np.cumsum(quotes) + self.in_string) % 2 == 1  # after the mark; a closing quote counts as outside
        deltas = np.where(inside, 0, _DEPTH[kind])
        depth = self.depth + np.cumsum(deltas)  # [m] after the mark
        end = np.flatnonzero((depth <= 0) & (deltas < 0))
        if len(end):  # nothing after the closing bracket is structure
            last = int(end[0]) + 1
            self.closed_at = self.offset + int(at[last - 1]) + 1
            if chunk[at[last - 1]] != ord("]"):
                self._refuse_tail(chunk[at[last - 1] :], self.closed_at)
            at, kind, lines, inside, depth, deltas = (x[:last] for x in (at, kind, lines, inside, depth, deltas))
        separates = (
            (~inside & (kind == _COMMA) & (depth == 1)) | ((deltas > 0) & (depth == 1)) | ((deltas < 0) & (depth == 0))
        )
        self._close_elements(np.flatnonzero(separates), at, lines)
        if len(at):
            self.depth = int(depth[-1])
            self.in_string = bool(inside[-1])
        self.line += chunk.count(b"\n")
        if self.closed_at >= 0:
            self._refuse_tail(chunk[self.closed_at - self.offset :], self.closed_at)
        self.offset += len(chunk)

    def _close_elements(
        self, cuts: npt.NDArray[np.int64], at: npt.NDArray[np.int64], lines: npt.NDArray[np.int64]
    ) -> None:
        """Add the elements that end at a separator of this chunk; `cuts` are indices of the separators in `at`."""
        if self.element_begin >= 0 and not self.element_line and len(at):
            self.element_line = int(lines[0])
        if not len(cuts):
            return
        ends = at[cuts] + self.offset  # [c] a separator ends one element and begins the next
        begins = np.concatenate([[self.element_begin], ends[:-1] + 1])
        first_marks = cuts[:-1] + 1  # an element's first mark tells its line: blanks before it may hold newlines
        begin_lines = np.concatenate([[self.element_line], lines[first_marks]])
        skip = 1 if self.element_begin < 0 else 0  # the opening bracket ends nothing
        self.builder.add(begins[skip:], ends[skip:], begin_lines[skip:])
        self.num_elements += len(cuts) - skip
        self.element_begin = int(ends[-1]) + 1
        self.element_line = int(lines[cuts[-1] + 1]) if cuts[-1] + 1 < len(at) else 0

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


def _without_escaped(at: npt.NDArray[np.int64], kind: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    r"""Tell which marks are neither backslashes nor quotes that an odd run of backslashes escapes (`\"`, `\\\"`)."""
    is_slash = kind == _BACKSLASH
    follows = np.zeros(len(at), bool)  # directly after a backslash
    follows[1:] = is_slash[:-1] & (np.diff(at) == 1)
    indices = np.arange(len(at))
    run_begin = np.maximum.accumulate(np.where(is_slash & ~follows, indices, 0))
    escaped = follows & ((indices - run_begin) % 2 == 1)
    dropped: npt.NDArray[np.bool_] = is_slash | (escaped & (kind == _QUOTE))
    return ~dropped
