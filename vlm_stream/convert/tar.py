"""Raw tar: headers that are the same every time, and one pass over anybody's tar.

Enters: names and sizes, or a `read` function over a tar's bytes. Leaves: header blocks, or members with the exact place
of their headers and contents. What a sample is, is decided elsewhere.

Header blocks are those of `tarfile`. The pass is not: `tarfile` takes a damaged header in the middle of a tar for its
end, and what follows would be lost in silence.
"""

import contextlib
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from vlm_stream.errors import DatasetError

END_OF_TAR: Final = bytes(2 * tarfile.BLOCKSIZE)
_REGULAR: Final = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_EXTENSIONS: Final = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_PACKED: Final = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"))
_NAME_BYTES: Final = 100
_TYPE_BYTE: Final = 156
_MAGIC_BYTE: Final = 257
_MAX_SIZE_DIGITS: Final = 19  # of 64 bits
_MAX_EXTENSION_BYTES: Final = 1 << 20  # a longer PAX or long-name record is damage, not a name


@dataclass(frozen=True, slots=True, eq=False)
class TarMember:
    """One regular file of a tar, with its bytes."""

    name: str
    begin: int  # first byte of its first header block, extension headers included
    offset: int  # first content byte
    header: bytes
    content: bytes
    pad: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.content) + len(self.pad)

    @property
    def pieces(self) -> tuple[bytes, bytes, bytes]:
        return self.header, self.content, self.pad


Group: TypeAlias = list[tuple[str, TarMember]]
"""The members of one sample, with their names in it."""


@dataclass(frozen=True, slots=True)
class TarGap:
    """Bytes of a tar that are no members."""

    begin: int
    end: int
    fault: str  # a sentence with the offset
    name: str = ""  # what the damaged header calls its file, as far as it can be read
    goes_on: bool = False  # whether a whole header follows


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


def split_member_name(name: str) -> tuple[str, str]:
    """Split a tar member's name into key and extension, at the first dot of the last path component.

    >>> split_member_name("a.b/0001.seg.png")
    ('a.b/0001', 'seg.png')
    >>> split_member_name("README")
    ('README', '')
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension


def iter_members(read: Callable[[int], bytes], *, begin: int = 0) -> Iterator[TarMember]:
    """Yield the regular files of a tar, in order, in one pass; see `iter_pieces`."""
    for piece in iter_pieces(read, begin=begin):
        if isinstance(piece, TarGap):
            raise DatasetError(piece.fault)
        yield piece


def iter_pieces(read: Callable[[int], bytes], *, begin: int = 0) -> Iterator[TarMember | TarGap]:
    """Yield the regular files of a tar, in order, in one pass, and what lies between them and cannot be read.

    Understands ustar, PAX (`x` and `g`), GNU long names and base-256 sizes, and old V7 headers. Folders and links are
    passed over: they hold no bytes. Zero blocks end a tar, and another one may follow: tars are joined by `cat`. After
    a damaged header the pass goes on at the next one that is whole.

    Args:
        read: Returns exactly that many bytes, fewer only at the end.
        begin: Offset in the tar of the first byte that `read` gives.
    """
    tar = _Pass(read, begin)
    while True:
        first = tar.position
        try:
            member = tar.next_member()
        except _DamageError as error:
            gap = tar.find_next(first, error)
            yield gap
            if not gap.goes_on:
                return
            continue
        if member is None:
            return
        yield member


class _DamageError(Exception):
    """What is at `position` cannot be read; `block` is the header there, if that is what is damaged."""

    def __init__(self, fault: str, block: bytes = b"") -> None:
        super().__init__(fault)
        self.block = block


class _Pass:
    """One pass over a tar."""

    def __init__(self, read: Callable[[int], bytes], position: int) -> None:
        self._read_bytes = read
        self.position = position
        self._shared: dict[str, str] = {}
        self._found = b""  # a header block that was found after a gap

    def next_member(self) -> TarMember | None:
        """Return the next regular file; None at the end of the bytes."""
        header = b""
        pax: dict[str, str] = {}
        first = self.position
        while True:
            at = self.position
            block = self._read_block()
            if not block or not any(block):
                if header:
                    raise _DamageError(f"the tar ends after an extension header at byte {first}: it was cut short.")
                if not block:
                    return None
                first = self.position
                continue
            info = _parse_header(block, at)
            header += block
            if info.type in _EXTENSIONS:
                if info.size > _MAX_EXTENSION_BYTES:
                    raise _DamageError(f"the extension header at byte {at} claims {info.size} bytes: it is damaged.")
                body, pad = self._read_content(info.size, at)
                header += body + pad
                if info.type == tarfile.GNUTYPE_LONGNAME:
                    pax["path"] = body.rstrip(b"\0").decode("utf-8", "surrogateescape")
                elif info.type != tarfile.GNUTYPE_LONGLINK:
                    (pax if info.type == tarfile.XHDTYPE else self._shared).update(_parse_pax(body, self.position))
                continue
            fields = self._shared | pax
            if info.type in _REGULAR:
                if any(field.startswith("GNU.sparse") for field in fields):
                    raise _DamageError(f"the file at byte {first} is stored sparse: write the tar without --sparse.")
                size = _pax_size(fields["size"], first) if "size" in fields else info.size
                offset = self.position
                content, pad = self._read_content(size, at)
                return TarMember(fields.get("path") or info.name, first, offset, header, content, pad)
            if info.type not in tarfile.SUPPORTED_TYPES or info.type == tarfile.GNUTYPE_SPARSE:
                raise _DamageError(
                    f"the header at byte {at} has the unknown type {info.type!r}: the tar cannot be indexed. "
                    f"Write it again as ustar or PAX."
                )
            header, first, pax = b"", self.position, {}

    def find_next(self, begin: int, error: _DamageError) -> TarGap:
        """Go on to the next whole header; return what was passed over.

        Where an extension header may have been lost, the name of the next file is lost as well: it is passed over.
        """
        is_file = error.block[_TYPE_BYTE : _TYPE_BYTE + 1] in (*_REGULAR, tarfile.DIRTYPE)
        name = error.block[:_NAME_BYTES].split(b"\0")[0].decode("utf-8", "replace") if is_file else ""
        while block := self._read_block():
            if len(block) == tarfile.BLOCKSIZE and block[_MAGIC_BYTE:].startswith(b"ustar"):
                with contextlib.suppress(_DamageError):
                    info = _parse_header(block, self.position)
                    if is_file or info.type in _EXTENSIONS:
                        self._found, self.position = block, self.position - len(block)
                        return TarGap(begin, self.position, str(error), name, goes_on=True)
                    if info.type in _REGULAR:
                        self._read_content(info.size, self.position)
                        is_file = True
        return TarGap(begin, self.position, str(error), name, goes_on=False)

    def _read(self, size: int) -> bytes:
        data = self._read_bytes(size)
        self.position += len(data)
        return data

    def _read_block(self) -> bytes:
        if self._found:
            block, self._found = self._found, b""
            self.position += len(block)
            return block
        return self._read(tarfile.BLOCKSIZE)

    def _read_content(self, size: int, at: int) -> tuple[bytes, bytes]:
        """Return the content and the padding after the header at `at`."""
        parts = []
        for wanted in (size, padding(size)):
            data = self._read(wanted) if wanted else b""
            if len(data) < wanted:
                raise _DamageError(
                    f"the tar ends inside the file whose header is at byte {at} "
                    f"({len(data)} of {wanted} bytes): it was cut short."
                )
            parts.append(data)
        return parts[0], parts[1]


def _parse_header(block: bytes, position: int) -> tarfile.TarInfo:
    packed = next((name for magic, name in _PACKED if position == 0 and block.startswith(magic)), None)
    if packed:
        raise _DamageError(f"the file is no tar but packed by {packed}; unpack it first.")
    if len(block) < tarfile.BLOCKSIZE:
        raise _DamageError(f"the tar ends inside the header at byte {position}: it was cut short.")
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if info.size < 0:
            raise tarfile.HeaderError(f"size {info.size}")
    except (tarfile.HeaderError, ValueError) as error:
        fault = f"the header at byte {position} is damaged ({error}): what follows it cannot be trusted."
        raise _DamageError(fault, block) from None
    return info


def _parse_pax(body: bytes, position: int) -> dict[str, str]:
    fields = {}
    while body.strip(b"\0"):
        length, _, rest = body.partition(b" ")
        if not length.isdigit() or not len(length) + 1 < int(length) <= len(body):
            raise _DamageError(f"the PAX header before byte {position} is damaged: what follows it cannot be trusted.")
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        fields[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        body = body[int(length) :]
    return fields


def _pax_size(text: str, position: int) -> int:
    if not text.isdecimal() or len(text) > _MAX_SIZE_DIGITS:
        raise _DamageError(f"the PAX header at byte {position} has the size {text[:40]!r}: it is damaged.")
    return int(text)
