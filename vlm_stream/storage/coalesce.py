"""Which ranges to ask for: spans in, requests out. Arithmetic alone, no I/O.

    spans of one shard, by offset      [a]  [b]        [c][d]
    gaps <= max_gap are read over      [a---b]         [cd]        one request each, unless too much of it is gap
    nothing larger than max_request    a longer run is cut between spans, a longer span into equal parts
    most of the shard wanted           every gap is read over
    local files                        no gap is read over

Requests come out in the order in which their first span is needed.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from vlm_stream.storage.url import scheme_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.storage.options import ReadOptions
    from vlm_stream.storage.values import Span

__all__ = ["RangeRequest", "plan_requests"]


class RangeRequest(NamedTuple):
    """One range of one shard, and which spans it serves."""

    root: str
    path: str
    offset: int
    size: int
    spans: tuple[int, ...]
    """Positions of the spans that need these bytes."""
    shard_size: int | None = None
    etag: str | None = None


class _Limits(NamedTuple):
    """How far the spans of one shard are merged."""

    max_run: int
    """Bytes."""
    max_gap: float
    """Bytes that nobody wants, between two that somebody does."""
    max_amplification: float
    """Bytes read per byte wanted."""


def plan_requests(spans: Sequence[Span], options: ReadOptions) -> list[RangeRequest]:
    """Cover every span by requests; a span larger than a request is covered by several, in offset order."""
    by_shard: dict[tuple[object, ...], list[int]] = {}
    for position, (root, path, _, _, _, _, shard_size, etag) in enumerate(spans):
        by_shard.setdefault((root, path, shard_size, etag), []).append(position)
    requests: list[RangeRequest] = []
    for positions in by_shard.values():
        first = spans[positions[0]]
        if len(positions) == 1 and first.size <= options.max_request_bytes:  # most, where many shards are mixed
            root, path, offset, size, _, _, shard_size, etag = first
            requests.append(RangeRequest(root, path, offset, size, (positions[0],), shard_size, etag))
            continue
        limits = _limits(spans, positions, options)
        requests += _plan_shard(spans, positions, options, limits)
    requests.sort(key=lambda request: (min(request.spans), request.offset))
    return requests


def _plan_shard(
    spans: Sequence[Span], positions: list[int], options: ReadOptions, limits: _Limits
) -> list[RangeRequest]:
    """Merge the spans of one shard along their offsets."""
    first = spans[positions[0]]
    max_run, max_gap, max_amplification = limits
    requests: list[RangeRequest] = []
    begin = end = num_wanted = 0
    members: list[int] = []

    def close_run() -> None:
        if members:
            requests.append(
                RangeRequest(first.root, first.path, begin, end - begin, tuple(members), first.shard_size, first.etag)
            )

    # As few calls as can be: this runs for every sample.
    for offset, size, position in sorted([(*spans[position][2:4], position) for position in positions]):
        span_end = offset + size
        new_end = span_end if span_end > end else end
        num_new = new_end - (offset if offset > end else end)
        run = new_end - begin
        # Not "<=": without a limit, nothing wanted so far makes it no number.
        is_diluted = run > max_amplification * (num_wanted + num_new)
        if members and offset - end <= max_gap and run <= max_run and not is_diluted:
            end, num_wanted = new_end, num_wanted + num_new
            members.append(position)
            continue
        close_run()
        begin, end, num_wanted, members = offset, span_end, size, [position]
        if size > options.max_request_bytes:
            requests += _parts(spans[position], position, options.max_request_bytes)
            members = []
    close_run()
    return requests


def _limits(spans: Sequence[Span], positions: list[int], options: ReadOptions) -> _Limits:
    if scheme_of(spans[positions[0]].root) == "file":  # one more request costs less than to copy a gap
        return _Limits(options.max_request_bytes, 0, float("inf"))
    shard_size = spans[positions[0]].shard_size
    if shard_size:
        wanted = {spans[p].offset: spans[p].size for p in positions}
        if sum(wanted.values()) >= options.whole_shard_fraction * shard_size:
            return _Limits(options.max_request_bytes, float("inf"), float("inf"))
    return _Limits(options.max_request_bytes, options.max_gap_bytes, options.max_amplification)


def _parts(span: Span, position: int, max_bytes: int) -> list[RangeRequest]:
    """Cut one large span into the fewest parts of nearly equal size."""
    num_parts = -(-span.size // max_bytes)
    bounds = [span.size * part // num_parts for part in range(num_parts + 1)]
    return [
        RangeRequest(span.root, span.path, span.offset + low, high - low, (position,), span.shard_size, span.etag)
        for low, high in itertools.pairwise(bounds)
    ]
