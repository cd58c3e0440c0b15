"""The table of one clip: how its pictures are coded, and where each of them lies in the file.

Packets stand in the order in which a decoder takes them. A group of pictures (GOP) begins with a packet that needs none
before it. Presentation times are those after the file's edit list; packets that the list hides have none of the shown
frames, but others may need them. As bytes a table takes about two for each frame: numbers become differences, their
bytes are put plane by plane, and zlib does the rest.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

CODECS: Final = frozenset({"h264", "hevc", "vp8", "vp9", "libdav1d"})
"""Decoders in FFmpeg that may be given packets."""
MOST_PACKETS: Final = 1 << 20
"""Of the tables of one sample; some eleven hours."""

_LEVEL: Final = 9
_PACKET_BYTES: Final = 48
"""At most, of a packet in the table's columns."""
_HEAD_BYTES: Final = 1 << 20
_FARTHEST: Final = 1 << 41
"""Bytes and ticks from one packet to the next: sums of so many stay far from the ends of 64 bits."""


class Codec(NamedTuple):
    """What a decoder must be told before its first packet."""

    name: str
    """Of the decoder in FFmpeg."""
    extradata: bytes
    width: int
    height: int
    colour: tuple[int, ...]
    """Range, space, primaries and transfer, as FFmpeg numbers them: pictures may leave them to the container."""
    turns: int
    """Quarter turns, counter-clockwise, that bring a picture upright."""
    time_base: tuple[int, int]
    """Seconds of one tick of the presentation times, as a fraction."""


@dataclass(frozen=True, eq=False)  # no slots: what follows from the columns is kept
class ClipTable:
    """The packets of the video stream of one file, or of neighbouring GOPs of it."""

    codec: Codec
    is_plain: bool
    """Eight bits, not interlaced, no GOP that needs another, nothing hidden: all libraries give the same frames."""
    rate: tuple[int, int]
    """Average frames per second, as a fraction; 0/1: the file does not say."""
    start: int
    """Presentation time of the file's first frame, in ticks."""
    offset: Ints
    """[packets] First byte in the file; ascending."""
    size: Ints
    """[packets]"""
    pts: Ints
    """[packets] Presentation time in ticks."""
    shown: npt.NDArray[np.bool_]
    """[packets]"""
    begins: Ints
    """[GOPs] First packet of each; the first is 0."""
    crc32c: Ints
    """[GOPs] Of the bytes from the first packet of each to the end of its last; other streams may lie between."""

    @property
    def sides(self) -> tuple[int, int]:
        """Return height and width of the upright pictures."""
        sides = (self.codec.height, self.codec.width)
        return sides[::-1] if self.codec.turns % 2 else sides

    @property
    def fps(self) -> float:
        """Return the average frames per second; 0: the file does not say."""
        return self.rate[0] / self.rate[1] if self.rate[0] else 0.0

    @property
    def num_gops(self) -> int:
        """Return the number of GOPs."""
        return len(self.begins)

    @property
    def num_frames(self) -> int:
        """Return the number of frames that are shown."""
        return int(self.shown.sum())

    @cached_property
    def frames(self) -> Ints:
        """Return [frames] the packet of each frame, by presentation time."""
        packets = np.flatnonzero(self.shown)
        return packets[np.argsort(self.pts[packets], kind="stable")]

    @cached_property
    def times(self) -> npt.NDArray[np.float64]:
        """Return [frames] when each is shown, in seconds from the first of the file."""
        pts, (numerator, denominator) = self.pts[self.frames], self.codec.time_base
        return (pts - self.start) * numerator / denominator

    def keyframes_of(self, first: int, frames: int) -> tuple[int, ...]:
        """Return which of some neighbouring frames are keyframes, counted from the first of these; none is hidden."""
        is_keyframe = np.isin(self.frames[first : first + frames], self.begins)
        return tuple(np.flatnonzero(is_keyframe).tolist())

    @property
    def num_bytes(self) -> int:
        """Return how long the file is at least."""
        return int(self.offset[-1] + self.size[-1])

    def gop_range(self, gop: int) -> tuple[int, int]:
        """Return first byte and size of a GOP."""
        ends = self.begins[gop + 1] if gop + 1 < self.num_gops else len(self.offset)
        begin = int(self.offset[self.begins[gop]])
        return begin, int(self.offset[ends - 1] + self.size[ends - 1]) - begin

    def gops_of(self, first: int, frames: int) -> int:
        """Return how many GOPs hold some neighbouring frames."""
        packets = self.frames[first : first + frames]
        return len(np.unique(np.searchsorted(self.begins, packets, side="right")))

    def seconds(self, packet: int) -> float:
        """Return the time at which a packet is shown, counted from the first frame of the file."""
        return (int(self.pts[packet]) - self.start) * self.codec.time_base[0] / self.codec.time_base[1]

    def to_bytes(self) -> bytes:
        """Return the table in its small form."""
        codec = self.codec._asdict() | {"extradata": self.codec.extradata.hex()}
        codec |= {"is_plain": self.is_plain, "rate": self.rate, "start": self.start}
        ends = np.concatenate([[0], self.offset[:-1] + self.size[:-1]])
        steps = np.diff(self.pts, prepend=0)
        numbers = _to_planes(self.offset - ends, self.size, steps, ~self.shown, np.diff(self.begins), self.crc32c)
        return zlib.compress(json.dumps(codec, separators=(",", ":")).encode() + b"\n" + numbers, _LEVEL)

    @classmethod
    def from_bytes(cls, data: bytes, most_packets: int = MOST_PACKETS) -> ClipTable:
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: The bytes are something else, a table that cannot be, or one of more packets.
        """
        try:
            inflate = zlib.decompressobj()
            raw = inflate.decompress(data, _HEAD_BYTES + _PACKET_BYTES * most_packets)
            if not inflate.eof:
                raise ValueError("a table of a clip is cut off, or larger than any")
            head, _, planes = raw.partition(b"\n")
            told = json.loads(head)
            is_plain, rate, start = bool(told.pop("is_plain")), tuple(told.pop("rate")), told.pop("start")
            told |= {
                "extradata": bytes.fromhex(told["extradata"]),
                "colour": tuple(told["colour"]),
                "time_base": tuple(told["time_base"]),
            }
            codec = Codec(**told)
            gaps, size, steps, hidden, lengths, crc32c = columns = _from_planes(planes, 6)
            _check(codec, rate, start, columns)
        except (AttributeError, KeyError, TypeError, RecursionError, zlib.error) as error:
            raise ValueError(f"no table of a clip ({error})") from error
        return cls(
            codec=codec,
            is_plain=is_plain,
            rate=rate,
            start=start,
            offset=np.cumsum(gaps + size) - size,
            size=size,
            pts=np.cumsum(steps),
            shown=hidden == 0,
            begins=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            crc32c=crc32c,
        )


def _check(codec: Codec, rate: tuple[int, ...], start: object, columns: list[Ints]) -> None:
    """Refuse a table that no clip has: whoever made the dataset wrote it."""
    gaps, size, steps, hidden, lengths, crc32c = columns
    same = len({len(gaps), len(size), len(steps), len(hidden)}) == 1 and len(crc32c) == len(lengths) + 1
    if not same or not len(size) or lengths.sum() >= len(size):
        raise ValueError("the columns of a table do not fit each other")
    if hidden.all():
        raise ValueError("a table shows nothing")
    for column, least, most in (
        *((gaps, 0, _FARTHEST), (size, 1, _FARTHEST), (steps, -_FARTHEST, _FARTHEST)),
        *((lengths, 1, len(size)), (crc32c, 0, (1 << 32) - 1)),
    ):
        if np.any((column < least) | (column > most)):
            raise ValueError("a table has numbers that no file has")
    is_known = codec.name in CODECS and (len(codec.time_base), len(rate), len(codec.colour)) == (2, 2, 4)
    positive, others = (codec.width, codec.height, *codec.time_base, *rate[1:]), (*rate, codec.turns, *codec.colour)
    is_known = is_known and all(type(number) is int and 0 <= number < 1 << 31 for number in (*positive, *others))
    if not is_known or not all(positive) or type(start) is not int or abs(start) > _FARTHEST * MOST_PACKETS:
        raise ValueError("a table tells of no codec that is known")


def pack_numbers(*columns: Sequence[int] | npt.NDArray[np.generic]) -> bytes:
    """Return columns of 64-bit numbers as few bytes."""
    return zlib.compress(_to_planes(*columns), _LEVEL)


def unpack_numbers(data: bytes, count: int) -> list[Ints]:
    """Return the `count` columns that `pack_numbers` was given.

    Raises:
        ValueError, zlib.error: The bytes are something else.
    """
    return _from_planes(zlib.decompress(data), count)


def _to_planes(*columns: Sequence[int] | npt.NDArray[np.generic]) -> bytes:
    parts = []
    for column in columns:
        values = np.asarray(column).astype("<i8")
        zigzag = (values << 1) ^ (values >> 63)  # small negative numbers have as many zero bytes as positive ones
        planes = np.ascontiguousarray(zigzag).view(np.uint8).reshape(-1, 8).T
        parts += [len(values).to_bytes(4, "little"), planes.tobytes()]
    return b"".join(parts)


def _from_planes(raw: bytes, count: int) -> list[Ints]:
    columns: list[Ints] = []
    at = 0
    for _ in range(count):
        length = int.from_bytes(raw[at : at + 4], "little")
        planes = np.frombuffer(memoryview(raw)[at + 4 : at + 4 + 8 * length], np.uint8).reshape(8, length)
        zigzag = np.ascontiguousarray(planes.T).view("<u8").reshape(-1)
        columns.append((zigzag >> 1).astype(np.int64) ^ -(zigzag & 1).astype(np.int64))
        at += 4 + 8 * length
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes are left behind {count} columns")
    return columns
