"""Raw tar: headers that are the same every time, and one pass over anybody's tar.

Enters: names and sizes, or a `read` function over a tar's bytes. Leaves: header blocks, or members with the exact place
of their headers and contents. What a sample is, is decided elsewhere.

Header blocks are those of `tarfile`. The pass is not: `tarfile` takes a damaged header in the middle of a tar for its
end, and what follows would be lost in silence.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vlm_stream.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["END_OF_TAR", "TarMember", "iter_members", "member_header", "padding"]

END_OF_TAR: Final = bytes(2 * tarfile.BLOCKSIZE)
_REGULAR: Final = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_EXTENSIONS: Final = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
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
    return -size % tarfile.BLOCKSIZE


def member_header(name: str, size: int) -> bytes:
    """Return the header of a regular file: plain ustar, with a PAX record before it where ustar cannot say it.

    Time, user and group are zero, so the same content gives the same tar on any machine and day.
    """
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


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
        block = read(tarfile.BLOCKSIZE)
        if not block or not any(block):
            if header:
                raise DatasetError(f"the tar ends after an extension header at byte {first}: it was cut short.")
            return
        info = _parse_header(block, position)
        header += block
        if info.type in _EXTENSIONS:
            if info.size > _MAX_EXTENSION_BYTES:
                raise DatasetError(f"the extension header at byte {position} claims {info.size} bytes: it is damaged.")
            body, pad = _read_content(read, info.size, position)
            header += body + pad
            position += tarfile.BLOCKSIZE + len(body) + len(pad)
            if info.type == tarfile.GNUTYPE_LONGNAME:
                pax["path"] = body.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif info.type != tarfile.GNUTYPE_LONGLINK:
                (pax if info.type == tarfile.XHDTYPE else shared).update(_parse_pax(body, position))
            continue
        fields = shared | pax
        position += tarfile.BLOCKSIZE
        if info.type in _REGULAR:
            if any(field.startswith("GNU.sparse") for field in fields):
                raise DatasetError(f"the file at byte {first} is stored sparse: write the tar without --sparse.")
            size = _pax_size(fields["size"], first) if "size" in fields else info.size
            content, pad = _read_content(read, size, position - tarfile.BLOCKSIZE)
            yield TarMember(fields.get("path") or info.name, first, position, header, content, pad)
            position += len(content) + len(pad)
        elif info.type not in tarfile.SUPPORTED_TYPES or info.type == tarfile.GNUTYPE_SPARSE:
            raise DatasetError(
                f"the header at byte {position - tarfile.BLOCKSIZE} has the unknown type {info.type!r}: the tar cannot "
                f"be indexed. Write it again as ustar or PAX."
            )
        header, first, pax = b"", position, {}


def _parse_header(block: bytes, position: int) -> tarfile.TarInfo:
    if len(block) < tarfile.BLOCKSIZE:
        raise DatasetError(f"the tar ends inside the header at byte {position}: it was cut short.")
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if info.size < 0:
            raise tarfile.HeaderError(f"size {info.size}")
    except (tarfile.HeaderError, ValueError) as error:
        raise DatasetError(
            f"the header at byte {position} is damaged ({error}): what follows it cannot be trusted."
        ) from None
    return info


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


def _read_content(read: Callable[[int], bytes], size: int, position: int) -> tuple[bytes, bytes]:
    """Return the content and the padding after the header at `position`."""
    parts = []
    for wanted in (size, padding(size)):
        data = read(wanted) if wanted else b""
        if len(data) < wanted:
            raise DatasetError(
                f"the tar ends inside the file whose header is at byte {position} "
                f"({len(data)} of {wanted} bytes): it was cut short."
            )
        parts.append(data)
    return parts[0], parts[1]
