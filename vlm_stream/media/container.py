"""Which container a video is, by its bytes alone, from a closed list.

FFmpeg decides by content too, and some of its formats are texts that name what to open: playlists (HLS, DASH, IMF),
concat scripts, session descriptions. A "video" could so make any decoder read other files, or ask any host. No decoder
is given bytes that are not of the list, could be taken for such a text, or keep their pictures elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Read = Callable[[int, int], bytes]

_MAGIC: Final = (
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (8, b"AVI", "avi"),
    (0, b"FLV\x01", "flv"),
    (0, b"GIF87a", "gif"),
    (0, b"GIF89a", "gif"),
    (0, b"OggS", "ogg"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf"),
    (0, b"\x00\x00\x01\xba", "mpeg"),
    (0, b"\x00\x00\x01\xb3", "mpegvideo"),
    (0, b"DKIF", "ivf"),
)
_BOXES: Final = frozenset((b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp", b"sidx", b"uuid"))
"""What an ISO or QuickTime file may begin with."""
_HOLDERS: Final = frozenset((b"moov", b"trak", b"mdia", b"minf", b"dinf"))
"""Boxes of boxes, on the way to references."""
_NUM_READS: Final = 1_000_000
"""Boxes or elements that are looked at; a film in fragments has some ten thousand."""
_TS_PACKETS: Final = ((188, 0), (192, 4), (204, 0))
_TS_SYNC: Final = 0x47
_PROBED: Final = 1 << 20
"""As far as FFmpeg looks to tell a format."""
_TEXTS: Final = (b"<mpd", b"<compositionplaylist")
"""In text at the beginning they outweigh a container's own mark."""
_SESSION: Final = b"c=IN IP"
_SEGMENT: Final = 0x18538067
_LINKS: Final = {0x3CB923: "PrevUUID", 0x3EB923: "NextUUID", 0x6E67: "ChapterSegmentUUID"}
_LINK_HOLDERS: Final = frozenset((0x1549A966, 0x1043A770, 0x45B9, 0xB6))
"""Info, Chapters, EditionEntry, ChapterAtom."""
_EBML_BYTES: Final = 1024
_DEPTH: Final = 12


def check_container(data: bytes | bytearray | memoryview | str | Path, stage: str) -> str:
    """Return the name that FFmpeg has for the container.

    Raises:
        BadSampleError: It is none of the list, could be taken for a text, or keeps its pictures elsewhere.
    """
    if isinstance(data, (str, Path)):
        try:
            descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise BadSampleError(stage, "missing_file", f"The video file cannot be opened ({error}).") from error
        try:
            return _check(lambda at, size: os.pread(descriptor, size, at), os.fstat(descriptor).st_size, stage)
        finally:
            os.close(descriptor)
    view = memoryview(data)
    return _check(lambda at, size: bytes(view[at : at + size]), len(view), stage)


def _check(read_all: Read, size: int, stage: str) -> str:
    num_reads = 0

    def read(at: int, length: int) -> bytes:
        nonlocal num_reads
        num_reads += 1
        if num_reads > _NUM_READS:
            raise BadSampleError(stage, "bad_video", f"The video has more than {_NUM_READS:,} parts.")
        return read_all(at, length)

    head = read(0, _PROBED)
    name = _name_of(head)
    if name is None or _reads_as_text(head):
        raise BadSampleError(
            stage,
            "unknown_container",
            "The bytes are no video file of a kind that is read (mp4, mov, mkv, webm, avi, MPEG-TS, MPEG-PS, flv, gif, "
            "ogg, wmv, ivf), so no decoder is given them. Convert the file to mp4, or give stills as a list of frames.",
        )
    if name == "mov":
        _check_boxes(read, 0, size, stage)
    elif name == "matroska":
        _check_elements(read, size, stage)
    return name


def _name_of(head: bytes) -> str | None:
    if head[4:8] in _BOXES:
        return "mov"
    for begin, magic, name in _MAGIC:
        if head.startswith(magic, begin):
            if name == "avi" and not head.startswith(b"RIFF"):
                continue
            if name == "matroska" and not any(kind in head[:_EBML_BYTES] for kind in (b"matroska", b"webm")):
                continue
            return name
    for length, begin in _TS_PACKETS:
        marks = head[begin : begin + 8 * length : length]
        if len(marks) >= 3 and marks == bytes([_TS_SYNC]) * len(marks):
            return "mpegts"
    return None


def _reads_as_text(head: bytes) -> bool:
    """Say whether FFmpeg may take a file for a text in spite of its magic bytes: it takes what looks likeliest."""
    text = head.partition(b"\0")[0].lower()
    return any(mark in text for mark in _TEXTS) or any(end + _SESSION in head for end in (b"\n", b"\r"))


def _refuse(stage: str, what: str) -> NoReturn:
    raise BadSampleError(
        stage,
        "outside_reference",
        f"The video refers to other files ({what}), and only the bytes that are given are read. Write it as one file "
        f"that holds everything: ffmpeg -i in -c copy out.mp4.",
    )


def _boxes(read: Read, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, begin and end of the content of each box; what is damaged ends them, as it ends a decoder's."""
    while begin + 8 <= end:
        head = read(begin, 16)
        size, kind, skip = int.from_bytes(head[:4], "big"), head[4:8], 8
        if size == 1:
            size, skip = int.from_bytes(head[8:16], "big"), 16
        stop = end if size == 0 else begin + size
        if stop < begin + skip:
            return
        yield kind, begin + skip, min(stop, end)
        begin = stop


def _check_boxes(read: Read, begin: int, end: int, stage: str, depth: int = 0) -> None:
    """Refuse references to other files, and a compressed header, where they cannot be seen."""
    for kind, at, stop in _boxes(read, begin, end):
        if kind == b"rmra":
            _refuse(stage, "a reference movie")
        elif kind == b"cmov":
            _refuse(stage, "perhaps: its header is compressed")
        elif kind == b"dref":
            for own, place, _ in _boxes(read, at + 8, stop):
                if not int.from_bytes(read(place, 4), "big") & 1:  # the flag that the pictures lie in this file
                    _refuse(stage, f"a data reference of the kind {own.decode('latin-1').strip()!r}")
        elif kind in _HOLDERS and depth < _DEPTH:
            _check_boxes(read, at, stop, stage, depth + 1)


def _check_elements(read: Read, size: int, stage: str) -> None:
    """Refuse a Matroska file whose header or chapters name other segments."""
    _, begin, header = _element(read, 0)
    if header is None or header > _EBML_BYTES:
        raise BadSampleError(stage, "bad_video", "The header of the Matroska file is damaged.")
    kind, begin, length = _element(read, begin + header)
    while kind not in (0, _SEGMENT) and length is not None:  # Void
        kind, begin, length = _element(read, begin + length)
    if kind == _SEGMENT:
        _walk_elements(read, begin, size if length is None else min(begin + length, size), stage, 0)


def _walk_elements(read: Read, begin: int, end: int, stage: str, depth: int) -> None:
    while begin < end:
        kind, begin, length = _element(read, begin)
        if kind in _LINKS:
            _refuse(stage, f"Matroska's {_LINKS[kind]}")
        if length is None or kind == 0:  # to the end, or damaged
            return
        if kind in _LINK_HOLDERS and depth < _DEPTH:
            _walk_elements(read, begin, min(begin + length, end), stage, depth + 1)
        begin += length


def _element(read: Read, at: int) -> tuple[int, int, int | None]:
    """Return kind, place of the content and its length (None: not known) of the element at a place."""
    head = read(at, 12)
    if not head or not head[0]:
        return 0, at, None
    width = 9 - head[0].bit_length()
    kind, head = int.from_bytes(head[:width], "big"), head[width:]
    if not head or not head[0]:
        return 0, at, None
    own = 9 - head[0].bit_length()
    length = int.from_bytes(head[:own], "big") & ((1 << 7 * own) - 1)
    return kind, at + width + own, None if length == (1 << 7 * own) - 1 else length
