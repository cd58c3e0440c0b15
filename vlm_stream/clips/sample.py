"""The tables of one sample: what stands in the sidecar of its shard.

A sample's bytes are those of its clips, and the rest: headers, text, other media. The rest is fetched with every cut,
so it has checksums of its own. As bytes: a line of JSON, then the tables one after the other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from vlm_stream.clips.cut import cut_table
from vlm_stream.clips.table import MOST_PACKETS, ClipTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


Part: TypeAlias = tuple[float, "float | None", int, int]


class ClipItem(NamedTuple):
    """One video of a conversation, in its order."""

    member: str | None
    """The file with a table that it shows; None: it is read whole."""
    named: tuple[int, ...] | None
    """The frames that it names itself; None: the rule picks."""
    span: Part | None = None
    """The part of the file that it shows: start and end in seconds, first frame in the table, frames; None: all of
    it."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """What is known of the clips of one sample."""

    items: tuple[ClipItem, ...]
    clips: dict[str, ClipTable]
    """By member; of one of which only parts are shown, the GOPs that these need."""
    rest: tuple[int, ...]
    """crc32c of each range of `spare_ranges`."""

    def num_gops(self, item: ClipItem) -> int:
        """Return how many GOPs a video has: 0 without a table, below 0 of the part of a file that it shows."""
        if item.member is None:
            return 0
        table = self.clips[item.member]
        return table.num_gops if item.span is None else -table.gops_of(*item.span[2:])


def cut_to_items(
    items: Sequence[ClipItem], clips: Mapping[str, ClipTable]
) -> tuple[tuple[ClipItem, ...], dict[str, ClipTable]]:
    """Return the videos of a sample, and of the tables of whole files what these need."""
    found = dict(clips)
    before = dict.fromkeys(clips, 0)
    for name, table in clips.items():
        parts = [item.span and item.span[2:] for item in items if item.member == name]
        if all(parts):
            found[name], before[name] = cut_table(table, [part for part in parts if part])
    return tuple(_earlier(item, before.get(item.member or "", 0)) for item in items), found


def _earlier(item: ClipItem, frames: int) -> ClipItem:
    if item.span is None:
        return item
    start, end, first, length = item.span
    return item._replace(span=(start, end, first - frames, length))


def spare_ranges(begin: int, end: int, clips: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of a sample outside of its clips, in order and without empty ones.

    >>> spare_ranges(0, 100, [(60, 10), (20, 30)])
    [(0, 20), (50, 10), (70, 30)]
    """
    found = []
    at = begin
    for offset, size in (*sorted(clips), (end, 0)):
        if offset > at:
            found.append((at, offset - at))
        at = offset + size
    return found


def encode_sample(table: SampleTable) -> bytes:
    """Return the bytes of a sample's tables."""
    bodies = {name: clip.to_bytes() for name, clip in table.clips.items()}
    head = {
        "items": [item[:2] if item.span is None else item for item in table.items],
        "clips": [(name, len(body)) for name, body in bodies.items()],
        "rest": table.rest,
    }
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + b"".join(bodies.values())


def decode_sample(data: bytes) -> SampleTable:
    """Read what `encode_sample` wrote.

    Raises:
        ValueError: The bytes are something else.
    """
    head, _, body = data.partition(b"\n")
    try:
        told = json.loads(head)
        clips: dict[str, ClipTable] = {}
        left = MOST_PACKETS
        for name, size in told["clips"]:
            clips[name] = ClipTable.from_bytes(body[:size], left)
            left -= len(clips[name].offset)
            body = body[size:]
        items = tuple(
            ClipItem(name, None if named is None else tuple(named), *map(tuple, span))
            for name, named, *span in told["items"]
        )
        table = SampleTable(items, clips, tuple(told["rest"]))
        _check(table)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no tables of a sample ({error})") from error
    return table


def _check(table: SampleTable) -> None:
    """Refuse tables that no sample has: whoever made the dataset wrote them."""
    if not all(map(_is_number, table.rest)) or not {item.member for item in table.items} - {None} == table.clips.keys():
        raise ValueError("the tables are not those of the videos that they name")
    for item in table.items:
        if not all(type(frame) is int and abs(frame) < 1 << 53 for frame in item.named or ()):
            raise ValueError("a video names frames that are none")
        if item.member is not None and item.span is not None:
            start, end, first, frames = item.span
            _ = start >= 0 and (end is None or end > start)  # numbers
            is_part = _is_number(first) and _is_number(frames) and first + frames <= table.clips[item.member].num_frames
            if not is_part or not frames:
                raise ValueError("a part of a clip is not in its table")


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32
