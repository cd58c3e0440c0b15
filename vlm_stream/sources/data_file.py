"""The raw examples of one data file by number: scanned once for their places, parsed only when read.

Enters: a JSON array or JSON lines, plain or compressed. Leaves: parsed JSON values with `file:line`. Memory is about 16
bytes per record. The file as a whole is refused only when its records cannot be told apart. What an example means is
decided elsewhere.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import SourceError
from vlm_stream.sources.local_file import LocalFile, plain_name
from vlm_stream.sources.scan import scan_array, scan_lines

if TYPE_CHECKING:
    from vlm_stream.sources.scan import RecordSpans
    from vlm_stream.storage import StoreOptions

__all__ = ["DataFile", "FileCache", "NotJsonError", "first_bytes", "holds_lines", "parse_json"]

# Half of a surrogate pair is legal JSON text and illegal UTF-8. Any escape of that range makes a second look worth it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LOG = logging.getLogger(__name__)
_BOM = b"\xef\xbb\xbf"
_LINE_SUFFIXES = (".jsonl", ".ndjson")
_PEEK_BYTES = 1 << 20
_BLANKS = b" \t\r\n"


class NotJsonError(ValueError):
    """The bytes are not a JSON value that can be kept."""

    def __init__(self, reason: str, fact: str) -> None:
        super().__init__(fact)
        self.reason = reason


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_json(data: bytes) -> Any:
    """Return the value; raise `NotJsonError`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = data[error.start]
        raise NotJsonError("not_utf8", f"byte 0x{bad:02x} at column {error.start + 1} is not UTF-8") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise NotJsonError("broken_json", f"broken JSON at character {error.pos + 1} ({error.msg})") from None
    except RecursionError:
        raise NotJsonError("broken_json", "broken JSON (nested too deeply)") from None
    except ValueError as error:  # NaN, Infinity, an integer of thousands of digits
        raise NotJsonError("broken_json", f"broken JSON ({error})") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            fact = "a string has half of a surrogate pair, which UTF-8 cannot hold"
            raise NotJsonError("lone_surrogate", fact) from None
    return value


class DataFile:
    """The raw examples of one file by number.

    `.jsonl` and `.ndjson` hold a record per line, anything else is told by its beginning.
    """

    def __init__(self, file: LocalFile | str) -> None:
        self.file = file if isinstance(file, LocalFile) else LocalFile(file)
        self.path = self.file.path
        self.spans: RecordSpans = _scan(self.file)

    def __len__(self) -> int:
        """Return the number of records, bad ones included."""
        return len(self.spans)

    def where(self, number: int) -> str:
        """Return `file:line`."""
        return f"{self.path}:{self.spans.lines[number]}"

    def load(self, number: int) -> Any:
        """Return the parsed example; raise `NotJsonError` when it is not JSON in UTF-8."""
        return parse_json(self.file.read_at(int(self.spans.begins[number]), int(self.spans.sizes[number])))


class FileCache:
    """Files that were made local or scanned already: entries may share one, and looking at an input opens it.

    `spill_dir` is where compressed and remote files are unpacked, `store` how to reach them.
    """

    def __init__(self, spill_dir: str | None = None, store: StoreOptions | None = None) -> None:
        self._spill_dir = spill_dir
        self._store = store
        self._local: dict[str, LocalFile] = {}
        self._scanned: dict[str, DataFile] = {}

    def local(self, path: str) -> LocalFile:
        """Return the plain bytes of a file."""
        if path not in self._local:
            self._local[path] = LocalFile(path, spill_dir=self._spill_dir, store=self._store)
        return self._local[path]

    def scanned(self, path: str) -> DataFile:
        """Return the examples of a file."""
        if path not in self._scanned:
            self._scanned[path] = DataFile(self.local(path))
        return self._scanned[path]


def first_bytes(file: LocalFile) -> tuple[int, bytes]:
    """Return the offset after a byte order mark, and the first bytes there; other encodings raise `SourceError`."""
    head = file.read_at(0, min(file.size_bytes, _PEEK_BYTES))
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head[:4].count(0) > 1:
        raise SourceError(
            f"{file.path}: the file is UTF-16 or UTF-32, and records are read as UTF-8 only. "
            "Convert it, for example with: iconv -f UTF-16 -t UTF-8."
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
    except NotJsonError:
        return False


def _scan(file: LocalFile) -> RecordSpans:
    begin, head = first_bytes(file)
    with file.stream() as stream:
        if holds_lines(file, head):
            spans = scan_lines(stream, begin)
        elif head.lstrip(_BLANKS).startswith(b"["):
            spans = scan_array(stream, file.path, begin)
        else:
            found = repr(head.lstrip(_BLANKS)[:20])[1:] if head.strip(_BLANKS) else "nothing"
            raise SourceError(
                f"{file.path}: Expected a JSON array of records or one JSON object per line, found {found}, so "
                "there is nothing to convert. Give the data file itself, a .json or .jsonl (.gz and .zst may follow)."
            )
    if not len(spans):
        _LOG.warning("%s: the file has no records", file.path)
    return spans
