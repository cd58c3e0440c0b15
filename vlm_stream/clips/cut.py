"""Wanted frames become runs of packets, and the byte ranges that hold them.

A frame needs the packets from the last keyframe at or before it, in time, up to its own. Those of one run are decoded
together; behind the last wanted frame of a run nothing is decoded. Ranges are whole GOPs: they have checksums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vlm_stream.clips.table import ClipTable, pack_numbers, unpack_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vlm_stream.clips.table import Codec, Ints


class ClipRun(NamedTuple):
    """Packets that are decoded one after the other."""

    ranges: tuple[tuple[int, int, int], ...]
    """First byte, size and crc32c of each GOP, in order."""
    seconds: tuple[float, ...]
    """Time of the first picture of each."""
    numbers: bytes
    """The packets: place in the joined ranges, size, time; and the wanted frames: time, number."""
    num_packets: int

    def unpack(self) -> tuple[Ints, dict[int, int]]:
        """Return [place, size, time] of the packets, and the wanted frames by their times."""
        place, size, steps, pts, frames = unpack_numbers(self.numbers, 5)
        packets = np.stack([np.cumsum(place), size, np.cumsum(steps)])
        return packets, dict(zip(pts.tolist(), frames.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class ClipCut:
    """What a builder must know to fetch and decode some frames of one clip."""

    codec: Codec
    runs: tuple[ClipRun, ...]

    @property
    def num_packets(self) -> int:
        """Return how many pictures are decoded."""
        return sum(run.num_packets for run in self.runs)


def cut_clip(table: ClipTable, frames: Iterable[int]) -> ClipCut:
    """Return the runs that hold some frames of a clip, in the order of the file."""
    runs: list[tuple[int, int, int, list[int]]] = []  # first and last GOP, last packet, frames
    for frame in sorted(set(frames)):
        packet = int(table.frames[frame])
        first, last = _gops_of(table, packet)
        if runs and first <= runs[-1][1]:
            begin, end, stop, wanted = runs[-1]
            runs[-1] = (begin, max(end, last), max(stop, packet), [*wanted, frame])
        else:
            runs.append((first, last, packet, [frame]))
    return ClipCut(table.codec, tuple(_run(table, *run) for run in runs))


def cut_table(table: ClipTable, parts: Iterable[tuple[int, int]]) -> tuple[ClipTable, int]:
    """Return the GOPs that some parts of a clip need, and how many frames lie before them.

    `parts` are the first frame of each and their number.
    """
    wanted = [(first, first + frames) for first, frames in parts]
    gops = [_gops_of(table, int(packet)) for first, stop in wanted for packet in table.frames[first:stop]]
    low, high = min(first for first, _ in gops), max(last for _, last in gops)
    begin, end = np.append(table.begins, len(table.pts))[[low, high + 1]].tolist()
    columns = {name: getattr(table, name)[begin:end] for name in ("offset", "size", "pts", "shown")}
    begins = table.begins[low : high + 1] - begin
    cut = replace(table, **columns, begins=begins, crc32c=table.crc32c[low : high + 1])
    before = int(np.flatnonzero(table.frames == cut.frames[0] + begin)[0])
    is_whole = np.array_equal(cut.frames + begin, table.frames[before : before + cut.num_frames])
    return (cut, before) if is_whole else (table, 0)  # GOPs of odd files are shown in turns


def _gops_of(table: ClipTable, packet: int) -> tuple[int, int]:
    """Return the first and the last GOP that a packet needs."""
    last = first = int(np.searchsorted(table.begins, packet, side="right")) - 1
    while first and table.pts[table.begins[first]] > table.pts[packet]:
        first -= 1  # a picture that is shown before the keyframe in front of it needs the GOP before, too
    return first, last


def _run(table: ClipTable, first: int, last: int, stop: int, frames: list[int]) -> ClipRun:
    ranges = tuple((*table.gop_range(gop), int(table.crc32c[gop])) for gop in range(first, last + 1))
    begins = table.begins[first : last + 1]
    packets = slice(int(begins[0]), stop + 1)
    # Places in the joined ranges: what lies between two GOPs is not fetched.
    before = np.cumsum([0, *(size for _, size, _ in ranges[:-1])])
    shift = before - np.array([begin for begin, _, _ in ranges])
    gops = np.searchsorted(begins, np.arange(packets.start, packets.stop), side="right") - 1
    place = table.offset[packets] + shift[gops]
    numbers = pack_numbers(
        np.diff(place, prepend=0),
        table.size[packets],
        np.diff(table.pts[packets], prepend=0),
        table.pts[table.frames[frames]],
        frames,
    )
    seconds = tuple(round(table.seconds(int(packet)), 3) for packet in begins)
    return ClipRun(ranges, seconds, numbers, packets.stop - packets.start)
