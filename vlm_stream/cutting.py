"""Samples with clips become the byte ranges that hold the frames a model sees.

Enters: a drawn sample and the tables of its clips. Leaves: spans to read in place of the whole sample, and how to
decode them. The plan has decided before which frames these are; nothing here changes what a batch holds. A clip of
which most is wanted is read whole, as one without a table is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vlm_stream.blueprint import CutMember
from vlm_stream.clips import cut_clip, decode_sample, spare_ranges
from vlm_stream.storage import Span, plan_requests
from vlm_stream.tokens import count_frames, frame_indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.clips import ClipTable, SampleTable
    from vlm_stream.format import Drawn
    from vlm_stream.storage import ReadOptions
    from vlm_stream.tokens import FrameRule, VideoSize

logger = logging.getLogger(__name__)

_DENSE: Final = 0.6
"""A sample of which this much would be read is read whole."""


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts samples for one run."""

    rule: FrameRule
    options: ReadOptions
    told: list[str] = field(default_factory=list, compare=False)
    """The first sample whose tables cannot be used."""

    def may_cut(self, drawn: Drawn) -> bool:
        """Tell from the index alone whether to read the tables of a sample: some GOP may have no wanted frame.

        A part of a clip (fewer than no GOPs) leaves the others out.
        """
        if drawn.table is None or drawn.num_bytes <= self.options.max_gap_bytes:
            return False
        # Frames that a sample names itself may lie close together: only the table tells.
        return any(
            gops < 0 or (gops > 0 and (bool(video.picked) or _num_frames(video, self.rule) < gops))
            for video, gops in zip(drawn.sizes.videos, drawn.table.gops, strict=True)
        )

    def cut(self, drawn: Drawn, data: bytes) -> tuple[tuple[Span, ...], tuple[CutMember, ...]] | None:
        """Return what to read in place of a sample, and its cut clips; None: read it whole."""
        try:
            tables = decode_sample(data)
            rest = _rest_of(tables, drawn)
        except ValueError as error:
            if not self.told:
                self.told.append(drawn.key)
                logger.warning(
                    "the tables of clips of %s in %s cannot be used (%s), so its clips are read whole; write tables "
                    "again with: vlm-stream index",
                    drawn.key,
                    drawn.span.path,
                    error,
                )
            return None
        wanted, facts = _wanted(drawn.sizes.videos, tables, self.rule)
        whole, places = drawn.span, {name: offset for name, offset, _ in drawn.members}
        parts = [
            whole._replace(offset=offset, size=size, crc32c=crc, members=_inside(whole, offset, size, tables.clips))
            for (offset, size), crc in rest
        ]
        parts = [part for part in parts if part.members]  # headers and padding tell nothing
        parts += [span for span in drawn.shared if span.members[0][0] not in tables.clips]
        clips = []
        for name, table in tables.clips.items():
            videos = tuple(number for number, item in enumerate(tables.items) if item.member == name)
            spans = tuple(dict.fromkeys(item.span for item in tables.items if item.member == name and item.span))
            clips.append(CutMember(name, cut_clip(table, wanted[name]), facts[name], videos, spans))
            holder = drawn.holder(name)
            for run in clips[-1].cut.runs:
                for begin, size, crc in run.ranges:
                    offset = places[name] + begin
                    parts.append(holder._replace(offset=offset, size=size, crc32c=crc, members=(("", offset, size),)))
        num_read = sum(request.size for request in plan_requests(parts, self.options))
        if num_read > _DENSE * drawn.num_bytes or drawn.num_bytes - num_read < self.options.max_gap_bytes:
            return None
        return tuple(parts), tuple(clips)


def _rest_of(tables: SampleTable, drawn: Drawn) -> list[tuple[tuple[int, int], int]]:
    """Return the ranges of a sample outside of its clips, each with its checksum.

    Raises:
        ValueError: The tables are of other clips than those of the index, by whose sizes limits and counts go.
    """
    sizes = {name: size for name, _, size in drawn.members}
    if len(tables.items) != len(drawn.sizes.videos):
        raise ValueError("they are of other videos than the index has")
    for item, video in zip(tables.items, drawn.sizes.videos, strict=True):
        if item.member is None:
            continue
        table = tables.clips[item.member]
        frames = table.num_frames if item.span is None else item.span[3]
        if (frames, *table.sides, table.fps) != (video.frames, video.height, video.width, video.fps):
            raise ValueError(f"they tell of {item.member} otherwise than the index")
        if table.num_bytes > sizes.get(item.member, 0):
            raise ValueError(f"they have places outside of {item.member}")
    whole = drawn.span
    own = [(offset, size) for name, offset, size in whole.members if name in tables.clips]
    rest = spare_ranges(whole.offset, whole.offset + whole.size, own)
    if len(rest) != len(tables.rest):
        raise ValueError("they are of a sample with other members")
    return list(zip(rest, tables.rest, strict=True))


def _num_frames(video: VideoSize, rule: FrameRule) -> int:
    known = len(video.keyframes)
    return int(count_frames(video.frames, video.fps, rule, seconds=video.seconds, keyframes=known))


def _wanted(
    videos: Sequence[VideoSize], tables: SampleTable, rule: FrameRule
) -> tuple[dict[str, set[int]], dict[str, tuple[int, int, int, float, float]]]:
    """Return the frames of each clip that some item shows, and the clip's facts."""
    wanted: dict[str, set[int]] = {}
    facts = {}
    for video, item in zip(videos, tables.items, strict=True):
        if item.member is not None:
            first = 0 if item.span is None else item.span[2]
            picked = frame_indices(video.frames, video.fps, rule, item.named, video.keyframes) + first
            wanted.setdefault(item.member, set()).update(picked.tolist())
            frames = tables.clips[item.member].num_frames
            seconds = frames / video.fps if video.fps > 0 else video.seconds * frames / video.frames
            facts[item.member] = (frames, video.height, video.width, video.fps, seconds)
    return wanted, facts


def _inside(span: Span, offset: int, size: int, clips: dict[str, ClipTable]) -> tuple[tuple[str, int, int], ...]:
    """Return the members of a sample that lie in a range outside of its clips."""
    return tuple(
        member for member in span.members if member[0] not in clips and offset <= member[1] <= offset + size - member[2]
    )
