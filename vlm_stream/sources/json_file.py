"""The raw examples of a JSON array or of JSON lines, by number: found in one pass, parsed only when read.

Enters: a local file. Leaves: parsed JSON values and the places of their records, 16 bytes each. A file is refused only
when its records cannot be told apart; whether one of them is JSON shows when it is read. What an example means is
decided elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from array import array
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import crc32c
import numpy as np
import numpy.typing as npt

from vlm_stream.errors import SourceError
from vlm_stream.sources.local_file import LocalFile, plain_name

# Half of a surrogate pair is legal JSON text and illegal UTF-8. Any escape of that range makes a second look worth it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LOG = logging.getLogger(__name__)
_BOM = b"\xef\xbb\xbf"
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_LINE_SUFFIXES = (".jsonl", ".ndjson")
_PEEK_BYTES = 1 << 20


class UnreadableError(ValueError):
    """A record cannot be had from its file: it is not JSON that can be kept, or a part of a table is damaged."""

    def __init__(self, reason: str, fact: str) -> None:
        super().__init__(fact)
        self.reason = reason


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_json(data: bytes) -> Any:
    """Return the value; raise `UnreadableError`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = data[error.start]
        raise UnreadableError("not_utf8", f"byte 0x{bad:02x} at column {error.start + 1} is not UTF-8") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise UnreadableError("broken_json", f"broken JSON at character {error.pos + 1} ({error.msg})") from None
    except RecursionError:
        raise UnreadableError("broken_json", "broken JSON (nested too deeply)") from None
    except ValueError as error:  # NaN, Infinity, an integer of thousands of digits
        raise UnreadableError("broken_json", f"broken JSON ({error})") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            fact = "a string has half of a surrogate pair, which UTF-8 cannot hold"
            raise UnreadableError("lone_surrogate", fact) from None
    return value


class DataFile:
    """The raw examples of one file by number.

    `.jsonl` and `.ndjson` hold a record per line, anything else is told by its beginning.
    """

    def __init__(self, file: LocalFile | str) -> None:
        self.file = file if isinstance(file, LocalFile) else LocalFile(file)
        self.path = self.file.path
        self.spans, self.is_array = _scan(self.file)

    def __len__(self) -> int:
        return len(self.spans)

    def digest(self) -> str:
        """Return what changes with any byte of the file."""
        crc = 0
        with self.file.stream() as stream:
            while piece := stream.read(_PEEK_BYTES):
                crc = crc32c.crc32c(piece, crc)
        return f"{self.file.size_bytes} {crc}"

    def raw(self, number: int) -> bytes:
        """Return a record as it stands in the file."""
        return self.file.read_at(int(self.spans.begins[number]), int(self.spans.sizes[number]))

    def where(self, number: int) -> str:
        """Return `file:line`, or `file[index]` of an array."""
        return f"{self.path}[{number}]" if self.is_array else f"{self.path}:{self.spans.lines[number]}"

    def load(self, number: int) -> Any:
        """Return the parsed example; raise `UnreadableError` when it is not JSON in UTF-8."""
        return parse_json(self.raw(number))


def first_bytes(file: LocalFile) -> tuple[int, bytes]:
    """Return the offset after a byte order mark, and the first bytes there; other encodings raise `SourceError`."""
    head = file.read_at(0, min(file.size_bytes, _PEEK_BYTES))
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head[:4].count(0) > 1:
        raise SourceError(
            f"{file.path}: the file is UTF-16 or UTF-32, and records are read as UTF-8 only. "
            "Convert it, for example with: iconv -f UTF-16 -t UTF-8."
        )
    if head.startswith(tuple(_PACKED)):
        packing = next(_PACKED[magic] for magic in _PACKED if head.startswith(magic))
        raise SourceError(
            f"{file.path}: the file is packed by {packing}, and its name does not say so, so no record of it is read. "
            f"Let its name end in {'.gz' if packing == 'gzip' else '.zst'}."
        )
    return (len(_BOM), head[len(_BOM) :]) if head.startswith(_BOM) else (0, head)


def holds_lines(file: LocalFile, head: bytes) -> bool:
    """Tell whether the file has one JSON value per line: by its name, else by a first line that is whole by itself."""
    if plain_name(file.path).endswith(_LINE_SUFFIXES):
        return True
    first, newline, rest = head.lstrip(_BLANKS).partition(b"\n")
    if not first.startswith(b"{") or not newline or not rest.strip(_BLANKS):
        return False
    try:
        return isinstance(parse_json(first), dict)
    except UnreadableError:
        return False


def _is_array(head: bytes) -> bool:
    """Tell an array from lines of which the first is bad: that line opens one and is not whole, or is all there is."""
    first, _, rest = head.lstrip(_BLANKS).partition(b"\n")
    if not first.startswith(b"["):
        return False
    more = bool(rest.strip(_BLANKS))
    try:
        parse_json(first)
    except UnreadableError:
        return more and first.rstrip(_BLANKS).endswith((b"[", b"{", b","))
    return not more


def _scan(file: LocalFile) -> tuple[RecordSpans, bool]:
    begin, head = first_bytes(file)
    with file.stream() as stream:
        is_array = not holds_lines(file, head)
        if not is_array and _is_array(head):
            raise SourceError(
                f"{file.path}: the name says one record per line, and the file is one JSON array, so no record of it "
                "is read. Let its name end in .json."
            )
        if not is_array:
            spans = scan_lines(stream, begin)
        elif head.lstrip(_BLANKS).startswith(b"["):
            spans = scan_array(stream, file.path, begin)
        else:
            found = repr(head.lstrip(_BLANKS)[:20])[1:] if head.strip(_BLANKS) else "nothing"
            raise SourceError(
                f"{file.path}: Expected a JSON array of records or one JSON object per line, found {found}, so "
                "there is nothing to convert. Give the data file itself: .json or .jsonl (.gz and .zst may follow), "
                ".parquet or .arrow."
            )
    if not len(spans):
        _LOG.warning("%s: the file has no records", file.path)
    return spans, is_array


# --- finding the records ---

_BLANKS = b" \t\r\n"
_BLANK = re.compile(rb"[ \t\r\n]*")
# All up to the next bracket (or comma) outside of strings. A string that does not end in the buffer does not match.
_PLAIN = rb'(?:[^"\[\]{}%s]++|"(?:[^"\\]++|\\.)*+")*+'
_TO_SEPARATOR = re.compile(_PLAIN % b"," + rb"[\[\]{},]", re.DOTALL)
_TO_BRACKET = re.compile(_PLAIN % b"" + rb"[\[\]{}]", re.DOTALL)
_FINDER = json.JSONDecoder(strict=False)
_INSIDE_STRING = re.compile(_PLAIN % b"" + rb'"', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordSpans:
    """The n records of one file, in file order."""

    begins: npt.NDArray[np.int64]  # [n] Byte offset; blanks after a record may be inside its span
    sizes: npt.NDArray[np.integer]  # [n] Bytes; uint32 unless a record is larger
    lines: npt.NDArray[np.integer]  # [n] Line on which the record begins, from 1; uint32 unless there are more

    def __len__(self) -> int:
        return len(self.begins)


class SpanBuilder:
    """Collects spans, in 16 bytes each as long as sizes and lines fit into 32 bits."""

    def __init__(self) -> None:
        self._begins = array("q")
        self._sizes = array("I")
        self._lines = array("I")

    def add(self, begin: int, end: int, line: int) -> None:
        """Append a record given by its half-open byte range."""
        self._begins.append(begin)
        self._sizes = _appended(self._sizes, end - begin)
        self._lines = _appended(self._lines, line)

    def build(self) -> RecordSpans:
        """Return everything added so far; the builder must not be used after that."""
        return RecordSpans(begins=_view(self._begins), sizes=_view(self._sizes), lines=_view(self._lines))


def _appended(column: array[int], value: int) -> array[int]:
    """Return the column with the value, wider if it does not fit."""
    if column.typecode == "I" and value >= 2**32:
        column = array("q", column)
    column.append(value)
    return column


def _view(column: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(column, column.typecode) if column else np.zeros(0, np.int64)


def scan_lines(stream: BinaryIO, begin: int = 0, chunk_bytes: int = 1 << 20) -> RecordSpans:
    """Return the spans of all lines that are not blank, from byte `begin` on; memory is a line and the spans."""
    builder = SpanBuilder()
    stream.seek(begin)
    lines = io.BufferedReader(cast("io.RawIOBase", stream), chunk_bytes)
    for number, line in enumerate(lines, 1):
        end = begin + len(line)
        if line.strip(_BLANKS):
            builder.add(begin, end, number)
        begin = end
    lines.detach()
    return builder.build()


def scan_array(stream: BinaryIO, name: str, begin: int = 0, chunk_bytes: int = 1 << 20) -> RecordSpans:
    """Return the spans of the array's elements; `begin` is the offset of its opening bracket or of blanks before it.

    Memory is a chunk or a record, whichever is larger, and the spans.
    """
    stream.seek(begin)
    scan = _ArrayScan(name, begin)
    rest = b""
    # a record that does not fit is read in pieces that double, so that no byte is looked at more than a few times.
    while not scan.is_closed and (chunk := stream.read(max(chunk_bytes, len(rest)))):
        rest = scan.feed(rest + chunk)
    if not scan.is_closed:
        raise scan.unfinished(rest)
    scan.refuse_more(rest)
    while chunk := stream.read(chunk_bytes):
        scan.refuse_more(chunk)
    return scan.builder.build()


class _ArrayScan:
    """The state between chunks: where the element under way began, and how deep in brackets the scan is."""

    def __init__(self, name: str, begin: int) -> None:
        self.name = name
        self.offset = begin  # of the bytes that come next
        self.depth = 0
        self.line = 1  # of those bytes
        self.begin = -1  # of the element, at its first byte that is not blank; -1: not seen yet
        self.begin_line = 1
        self.num_elements = 0
        self.is_closed = False
        self.builder = SpanBuilder()

    def feed(self, data: bytes) -> bytes:
        """Take as much as can be told, and return the rest: it goes before what is read next."""
        text = data.decode("latin-1")  # a character per byte, so that a parser's positions are offsets
        at = 0
        while not self.is_closed:
            if self.depth == 1 and self.begin < 0:
                start = _BLANK.match(data, at).end()  # type: ignore[union-attr]
                self.line += data.count(b"\n", at, start)
                at = start
                if at == len(data):
                    break  # the element's first byte is still to come
                self.begin, self.begin_line = self.offset + at, self.line
                # The parser finds the end of a good record fast. Others, and the last one of a chunk, go the slow way.
                with contextlib.suppress(ValueError, RecursionError):
                    end = _FINDER.raw_decode(text, at)[1]
                    if _TO_SEPARATOR.match(data, end):
                        self.line += data.count(b"\n", at, end)
                        at = end
            match = (_TO_SEPARATOR if self.depth <= 1 else _TO_BRACKET).match(data, at)
            if match is None:
                break
            self.line += data.count(b"\n", at, match.end())
            at = match.end()
            self._take(data[at - 1 : at], self.offset + at - 1)
        self.offset += at
        return data[at:]

    def _take(self, mark: bytes, position: int) -> None:
        """Follow one bracket or comma."""
        if mark in b"[{":
            self.depth += 1
            return
        if mark in b"]}":
            self.depth -= 1
            if self.depth:
                return
            self.is_closed = True
        is_empty_array = self.is_closed and not self.num_elements and self.begin == position
        if not is_empty_array:
            self.builder.add(self.begin, position, self.begin_line)
            self.num_elements += 1
        self.begin = -1
        if mark == b"}":
            self.refuse_more(mark)

    def refuse_more(self, tail: bytes) -> None:
        """Raise unless there is nothing but blanks."""
        if tail.strip(_BLANKS):
            raise SourceError(
                f"{self.name}: the array ends near byte {self.offset:,} (line {self.line}), after "
                f"{self.num_elements:,} records, and more follows, so a bracket is closed twice or files were glued "
                "together; nothing after it can be read. Mend the file, or write one record per line (.jsonl)."
            )

    def unfinished(self, rest: bytes) -> SourceError:
        """Return the error for a file that stops before its array does."""
        state = "inside a string" if _INSIDE_STRING.match(rest) else f"{self.depth} brackets deep"
        return SourceError(
            f"{self.name}: the array does not end: the file stops {state}, in record {self.num_elements} that "
            f"begins on line {self.begin_line if self.begin >= 0 else self.line}, so it is cut off or a bracket or "
            "quote is missing there. Mend the file, or write one record per line (.jsonl)."
        )
