"""JPEG headers: height and width of a file that is plainly fine, for a quarter of what Pillow's parser costs.

Enters: the bytes of a file. Leaves: its size as Pillow gives it, or None for anything that Pillow might refuse, warn of
or read in another way: the caller then asks Pillow, which has the last word and the error's sentence.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

__all__ = ["read_jpeg_size"]

_SEGMENT: Final = Struct(">BBH")  # 0xFF, marker, length with its own two bytes
_FRAME: Final = Struct(">BHHB")  # bits, height, width, components

_FRAMES: Final = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended, progressive
_SCAN: Final = 0xDA
_QUANTIZATION: Final = 0xDB
_UNREAD: Final = frozenset((0xC4, 0xDD, 0xFE))  # Huffman tables, restart interval, comment
_APPLICATION: Final = range(0xE0, 0xF0)
_PARSED_BY_PILLOW: Final = (b"Exif", b"MPF", b"Photoshop")
"""Application data whose content alone can make Pillow refuse a file or take it for another format."""


def read_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return (height, width), or None when the header up to the first scan is not plainly that of a sound JPEG."""
    if not data.startswith(b"\xff\xd8"):
        return None
    size = None
    position = 2
    while position + _SEGMENT.size <= len(data):
        prefix, marker, length = _SEGMENT.unpack_from(data, position)
        begin, end = position + _SEGMENT.size, position + 2 + length
        if prefix != 0xFF or end > len(data):
            return None
        if marker in _FRAMES:
            if size is not None:
                return None
            size = _read_frame(data, begin, length - 2)
            if size is None:
                return None
        elif marker == _SCAN:
            return size
        elif marker == _QUANTIZATION:
            if not _are_whole_tables(data, begin, end):
                return None
        elif marker in _APPLICATION:
            if not _is_plain_application(data, begin, length - 2):
                return None
        elif marker not in _UNREAD:
            return None
        position = end
    return None


def _read_frame(data: bytes, begin: int, size: int) -> tuple[int, int] | None:
    if size < _FRAME.size:
        return None
    bits, height, width, num_components = _FRAME.unpack_from(data, begin)
    sound = bits == 8 and num_components in (1, 3, 4) and size == _FRAME.size + 3 * num_components
    return (height, width) if sound and height and width else None


def _are_whole_tables(data: bytes, begin: int, end: int) -> bool:
    """Tell whether tables of 64 values, of one or two bytes by the high half of their first byte, fill the segment."""
    while begin < end:
        begin += 65 if data[begin] < 16 else 129
    return begin == end


def _is_plain_application(data: bytes, begin: int, size: int) -> bool:
    if data.startswith(_PARSED_BY_PILLOW, begin):
        return False
    # Pillow reads fields at fixed places of these, and refuses the file when they end before.
    return size >= (7 if data.startswith((b"JFIF", b"Adobe"), begin) else 14 if data.startswith(b"ICC_P", begin) else 0)
