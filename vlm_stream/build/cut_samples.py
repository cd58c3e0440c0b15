"""Samples that were read by ranges become members again: small files as they are, clips as the frames that were cut.

Enters: a piece of a blueprint and what was read for it. Leaves: the members of the sample; or what is wrong with it,
with the time in the clip where its bytes are damaged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlm_stream.clips import PickedClip
from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.blueprint import Piece
    from vlm_stream.storage import SpanResult


def join_parts(piece: Piece, results: Iterator[SpanResult], threads: int = 1) -> Any:
    """Take what was read for a piece; return its members, or a `BadSampleError`. Clips get so many threads."""
    found = [next(results) for _ in piece.reads]
    if not piece.parts:
        return found[0]
    num_gops = sum(len(run.ranges) for clip in piece.clips for run in clip.cut.runs)
    rest, gops = found[: len(found) - num_gops], iter(found[len(found) - num_gops :])
    members: dict[str, Any] = {}
    for part in rest:
        if isinstance(part, BadSampleError):
            return part
        members |= part
    for clip in piece.clips:
        ranges: list[list[memoryview]] = []
        for run in clip.cut.runs:
            ranges.append([])
            for seconds in run.seconds:
                gop = next(gops)
                if isinstance(gop, BadSampleError):
                    return BadSampleError(gop.stage, gop.reason, f"{clip.name} from {seconds:.2f} s on: {gop}")
                ranges[-1].append(gop[""])
        spans = {(start, end): (first, frames) for start, end, first, frames in clip.spans}
        members[clip.name] = PickedClip(clip.cut, clip.facts, ranges, spans, threads=threads)
    return members
