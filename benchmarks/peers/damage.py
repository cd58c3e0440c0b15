"""Damage one file of a loader in the middle: the place that says where a sample lies, or a byte of a picture.

Files of the comparison hold their members uncompressed, so a picture is found by its own markers in any of them.
"""

from __future__ import annotations

import io
import random
import struct
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["damage_header", "flip_payload_byte"]


def damage_header(folder: Path, files: str) -> Path:
    """Overwrite with garbage what locates a middle sample of the middle file; return the file.

    In a tar that is a member's 512-byte header, in an MDS shard or a LitData chunk the sample's entry in the offset
    table, in a Parquet file the middle of the footer.
    """
    file = _middle_file(folder, files)
    start, length = _PLACES[file.suffix](file)
    _overwrite(file, start, random.Random(0).randbytes(length))
    return file


def flip_payload_byte(folder: Path, files: str) -> Path:
    """Change one byte of a middle picture's entropy-coded data in the middle file; return the file.

    The picture keeps its markers and still decodes, to other pixels.
    """
    file = _middle_file(folder, files)
    data = file.read_bytes()
    for start, scan, end in _pictures_from_the_middle(data):
        pixels = _decode(data[start:end])
        for at in _coded_bytes_from_the_middle(data, scan, end):
            changed = bytes([data[at] ^ 0x10])
            if pixels is not None and _decode(data[start:at] + changed + data[at + 1 : end]) not in (None, pixels):
                _overwrite(file, at, changed)
                return file
    raise ValueError(f"{file} holds no JPEG whose damage would show.")


def _middle_file(folder: Path, files: str) -> Path:
    found = sorted(folder.rglob(files))
    if not found:
        raise FileNotFoundError(f"{folder} has no {files}.")
    return found[len(found) // 2]


def _overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as target:
        target.seek(at)
        target.write(data)


def _tar_header(file: Path) -> tuple[int, int]:
    with tarfile.open(file) as tar:
        members = tar.getmembers()
    return members[len(members) // 2].offset, tarfile.BLOCKSIZE


def _offset_entry(file: Path) -> tuple[int, int]:
    """Both MDS and LitData begin with the number of samples and so many offsets, and one for the end."""
    with file.open("rb") as source:
        (count,) = struct.unpack("<I", source.read(4))
    return 4 + 4 * (count // 2), 4


def _parquet_footer(file: Path) -> tuple[int, int]:
    """The footer stands before its own length and the closing magic."""
    size = file.stat().st_size
    with file.open("rb") as source:
        source.seek(size - 8)
        (length,) = struct.unpack("<I", source.read(4))
    return size - 8 - length // 2, min(64, length // 2)


_PLACES = {".tar": _tar_header, ".mds": _offset_entry, ".bin": _offset_entry, ".parquet": _parquet_footer}


def _pictures_from_the_middle(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield a JPEG's start, the start of its coded data and its end, from the file's middle on, then from the front."""
    middle = len(data) // 2
    for first, last in ((middle, len(data)), (0, middle)):
        start = data.find(b"\xff\xd8\xff", first, last)
        while start >= 0:
            scan = _scan(data, start)
            end = data.find(b"\xff\xd9", scan) if scan else -1
            if scan and end > 0:
                yield start, scan, end + 2
            start = data.find(b"\xff\xd8\xff", max(start + 1, end), last)


def _scan(data: bytes, start: int) -> int | None:
    """Follow a JPEG's segments to its coded data; None: they are not there, so it is no JPEG."""
    at = start + 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
        if marker == 0xDA:
            return at
    return None


def _coded_bytes_from_the_middle(data: bytes, scan: int, end: int) -> Iterator[int]:
    """Yield places where a changed byte neither breaks nor makes a marker."""
    for at in range((scan + end) // 2, end - 2):
        if 0xFF not in (data[at - 1], data[at], data[at] ^ 0x10):
            yield at


def _decode(picture: bytes) -> bytes | None:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(picture)).tobytes()
    except (OSError, SyntaxError):
        return None
