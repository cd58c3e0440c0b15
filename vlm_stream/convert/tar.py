"""Raw tar: headers written byte for byte the same every time, and a parser for one pass over anybody's tar.

Enters: names and sizes, or a `read` function over a tar's bytes. Leaves: header blocks, or members with the exact place
of their headers and contents. No clock, no user names, no file system; what a sample is, is decided elsewhere.

Python's `tarfile` hides where a PAX or GNU header begins, and a sample's byte range must begin there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vlm_stream.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BLOCK", "END_OF_TAR", "TarMember", "iter_members", "member_header", "padding"]

BLOCK: Final = 512
END_OF_TAR: Final = bytes(2 * BLOCK)
_MAX_USTAR_SIZE: Final = 8**11  # eleven octal digits
_MAX_USTAR_NAME: Final = 100
_REGULAR: Final = frozenset((b"0", b"\0", b"7"))
_WITHOUT_CONTENT: Final = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # links, devices, folders, pipes
_MAX_SIZE_DIGITS: Final = 19  # of 64 bits
_MAX_EXTENSION_BYTES: Final = 1 << 20  # a longer PAX or long-name record is damage, not a name


@dataclass(frozen=True, slots=True, eq=False)
class TarMember:
    """One regular file of a tar, with its bytes."""

    name: str
    begin: int
    """First byte of its first header block, extension headers included."""
    offset: int
    """First content byte."""
    header: bytes
    content: bytes
    pad: bytes

    @property
    def end(self) -> int:
        """Return the first byte after the padding."""
        return self.offset + len(self.content) + len(self.pad)


def padding(size: int) -> int:
    """Return how many zero bytes follow a content of `size` bytes."""
    return -size % BLOCK


def member_header(name: str, size: int) -> bytes:
    """Return the header of a regular file: plain ustar, with a PAX record before it where ustar cannot say it.

    Time, user and group are zero, so the same content gives the same tar on any machine and day.
    """
    records = b""
    if size >= _MAX_USTAR_SIZE:
        records += _pax_record("size", str(size))
    if not name.isascii() or len(name) > _MAX_USTAR_NAME:
        records += _pax_record("path", name)
    if not records:
        return _ustar_block(name.encode("ascii"), size, b"0")
    extension = _ustar_block(b"././@PaxHeader", len(records), b"x") + records + bytes(padding(len(records)))
    short = name.encode("ascii", "replace")[:_MAX_USTAR_NAME]
    return extension + _ustar_block(short, size if size < _MAX_USTAR_SIZE else 0, b"0")


def _ustar_block(name: bytes, size: int, kind: bytes) -> bytes:
    head = b"%b0000644\x000000000\x000000000\x00%011o\x0000000000000\x00" % (name.ljust(_MAX_USTAR_NAME, b"\0"), size)
    tail = b"%b%bustar\x0000" % (kind, bytes(100))
    block = (head + b" " * 8 + tail).ljust(BLOCK, b"\0")
    return b"%b%06o\0 %b" % (head, sum(block), block[156:])


def _pax_record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body) + 1
    while length != len(body) + len(str(length)):  # the length counts its own digits
        length = len(body) + len(str(length))
    return str(length).encode() + body


def iter_members(read: Callable[[int], bytes], *, begin: int = 0) -> Iterator[TarMember]:
    """Yield the regular files of a tar, in order, in one pass.

    Understands ustar, PAX (`x` and `g`), GNU long names and base-256 sizes, and old V7 headers. Folders and links are
    passed over: they hold no bytes. The end is two zero blocks, or the end of the bytes at a member's border.

    Args:
        read: Returns exactly that many bytes, fewer only at the end.
        begin: Offset in the tar of the first byte that `read` gives.

    Raises:
        DatasetError: A header is damaged, the tar is cut short, or it holds a sparse file; the sentence has the offset.
    """
    position = first = begin
    header = b""
    pax: dict[str, str] = {}
    shared: dict[str, str] = {}
    while True:
        block = read(BLOCK)
        if not block or not any(block):
            if header:
                raise DatasetError(f"the tar ends after an extension header at byte {first}: it was cut short.")
            return
        size, kind = _check_header(block, position)
        header += block
        if kind in (b"x", b"g", b"L", b"K"):
            body = _read_exactly(read, size, position, limit=_MAX_EXTENSION_BYTES)
            pad = _read_exactly(read, padding(size), position)
            header += body + pad
            position += BLOCK + size + len(pad)
            if kind == b"L":
                pax["path"] = body.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif kind != b"K":
                (pax if kind == b"x" else shared).update(_parse_pax(body, position))
            continue
        fields = shared | pax
        size = _pax_size(fields["size"], first) if "size" in fields else size
        if kind in _REGULAR:
            if any(field.startswith("GNU.sparse") for field in fields):
                raise DatasetError(f"the file at byte {first} is stored sparse: write the tar without --sparse.")
            content = _read_exactly(read, size, position)
            pad = _read_exactly(read, padding(size), position)
            name = fields.get("path") or _name_of(block)
            yield TarMember(name, first, position + BLOCK, header, content, pad)
            position += BLOCK + size + len(pad)
        elif kind in _WITHOUT_CONTENT:
            position += BLOCK
        else:
            raise DatasetError(
                f"the header at byte {position} has the unknown type {kind!r}: the tar cannot be indexed. "
                f"Write it again as ustar or PAX."
            )
        header, first, pax = b"", position, {}


def _check_header(block: bytes, position: int) -> tuple[int, bytes]:
    if len(block) < BLOCK:
        raise DatasetError(f"the tar ends inside the header at byte {position}: it was cut short.")
    stored = block[148:156].strip(b" \0")
    blanked = block[:148] + b" " * 8 + block[156:]
    sums = (sum(blanked), sum(byte - 256 if byte > 127 else byte for byte in blanked))  # some old tars sum signed
    try:
        if int(stored or b"-1", 8) not in sums:
            raise ValueError
        return _parse_size(block[124:136]), block[156:157]
    except ValueError:
        raise DatasetError(
            f"the header at byte {position} is damaged (checksum {stored!r}, computed {sums[0]:o}): "
            f"what follows it cannot be trusted."
        ) from None


def _parse_size(field: bytes) -> int:
    if field[0] & 0x80:  # base 256
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    size = int(field.strip(b" \0") or b"0", 8)
    if size < 0:
        raise ValueError("a file cannot have fewer than no bytes")
    return size


def _parse_pax(body: bytes, position: int) -> dict[str, str]:
    fields = {}
    while body.strip(b"\0"):
        length, _, rest = body.partition(b" ")
        if not length.isdigit() or not len(length) + 1 < int(length) <= len(body):
            raise DatasetError(f"the PAX header before byte {position} is damaged: what follows it cannot be trusted.")
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        fields[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        body = body[int(length) :]
    return fields


def _pax_size(text: str, position: int) -> int:
    if not text.isdecimal() or len(text) > _MAX_SIZE_DIGITS:
        raise DatasetError(f"the PAX header at byte {position} has the size {text[:40]!r}: it is damaged.")
    return int(text)


def _name_of(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].split(b"\0", 1)[0]):
        name = prefix + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _read_exactly(read: Callable[[int], bytes], size: int, position: int, *, limit: int | None = None) -> bytes:
    if limit is not None and size > limit:
        raise DatasetError(f"the extension header at byte {position} claims {size} bytes: it is damaged.")
    data = read(size) if size else b""
    if len(data) < size:
        raise DatasetError(
            f"the tar ends inside the file whose header is at byte {position} "
            f"({len(data)} of {size} bytes): it was cut short."
        )
    return data
