"""Spans: where samples lie, which requests bring them, and whether the bytes are right. No I/O, no tar headers.

    spans of one shard, by offset      [a]  [b]        [c][d]
    gaps <= max_gap are read over      [a---b]         [cd]        one request each, unless too much of it is gap
    nothing larger than max_request    a longer run is cut between spans, a longer span into equal parts
    most of the shard wanted           every gap is read over
    local files                        no gap is read over

Members, spans and requests are tuples: many are made, and a frozen dataclass takes longer to make.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

import crc32c

from vlm_stream.errors import BadSampleError, ChangedObjectError
from vlm_stream.storage.store import join_url, scheme_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.storage.options import ReadOptions
    from vlm_stream.storage.store import Buffer, Fetched


_MAX_SPAN: Final = 1 << 36
"""Bytes of a sample."""


class Member(NamedTuple):
    """One file of a sample inside its shard."""

    name: str
    """Without the sample's key: `json`, `0.jpg`."""
    offset: int
    """First content byte, counted from the start of the shard."""
    size: int


class Span(NamedTuple):
    """One sample's contiguous bytes in a shard, tar headers included; or only those of some of its members."""

    root: str
    """URL of the dataset: which store to ask."""
    path: str
    """The shard, relative to the root."""
    offset: int
    size: int
    crc32c: int | None
    """Checksum of the whole range. None: there is none (the span is a part of a sample), and nothing is checked."""
    members: tuple[tuple[str, int, int], ...]
    """Each a `Member`, or a plain tuple like one."""
    shard_size: int | None = None
    """Size of the whole shard in the manifest; a different one means that the object was replaced."""
    etag: str | None = None


class ShardKey(NamedTuple):
    """Which version of which shard."""

    root: str
    path: str
    size: int
    etag: str | None

    @property
    def digest(self) -> bytes:
        """Return the name under which the shard is kept."""
        text = "\0".join((self.root, self.path, str(self.size), (self.etag or "").strip('"')))
        return hashlib.sha256(text.encode()).digest()


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


def plan_requests(spans: Sequence[Span], options: ReadOptions) -> list[RangeRequest]:
    """Cover every span by requests, in the order in which their first span is needed.

    What lies at no place of a shard is not asked for. A span larger than a request is covered by several, in offset
    order.
    """
    by_shard: dict[tuple[object, ...], list[int]] = {}
    for position, span in enumerate(spans):
        if _is_nowhere(span):
            continue
        by_shard.setdefault((span.root, span.path, span.shard_size, span.etag), []).append(position)
    requests: list[RangeRequest] = []
    for positions in by_shard.values():
        requests += _plan_shard(spans, positions, options)
    requests.sort(key=lambda request: (min(request.spans), request.offset))
    return requests


def _plan_shard(spans: Sequence[Span], positions: list[int], options: ReadOptions) -> list[RangeRequest]:
    """Merge the spans of one shard along their offsets."""
    max_gap, max_amplification = _limits([spans[position] for position in positions], options)
    requests: list[RangeRequest] = []
    begin = end = num_wanted = 0
    run: list[int] = []
    for position in sorted(positions, key=lambda position: spans[position][2:4]):
        span = spans[position]
        new_end = max(end, span.offset + span.size)
        num_new = new_end - max(end, span.offset)
        fits = span.offset - end <= max_gap and new_end - begin <= options.max_request_bytes
        # "not >": an unlimited amplification times nothing wanted is not a number.
        if run and fits and not new_end - begin > max_amplification * (num_wanted + num_new):
            end, num_wanted = new_end, num_wanted + num_new
            run.append(position)
            continue
        if run:
            requests.append(_request(spans[run[0]], begin, end, run))
        begin, end, num_wanted, run = span.offset, span.offset + span.size, span.size, [position]
        if span.size > options.max_request_bytes:
            num_parts = -(-span.size // options.max_request_bytes)
            bounds = [span.offset + span.size * part // num_parts for part in range(num_parts + 1)]
            requests += [_request(span, low, high, run) for low, high in itertools.pairwise(bounds)]
            run = []
    if run:
        requests.append(_request(spans[run[0]], begin, end, run))
    return requests


def _limits(spans: list[Span], options: ReadOptions) -> tuple[float, float]:
    """Return how many unwanted bytes may lie between two spans, and how many may be read per byte wanted."""
    if scheme_of(spans[0].root) == "file":  # one more request costs less than to copy a gap
        return 0, float("inf")
    wanted = {span.offset: span.size for span in spans}
    shard_size = spans[0].shard_size
    if shard_size and sum(wanted.values()) >= options.whole_shard_fraction * shard_size:
        return float("inf"), float("inf")
    return options.max_gap_bytes, options.max_amplification


def _request(span: Span, begin: int, end: int, positions: list[int]) -> RangeRequest:
    return RangeRequest(span.root, span.path, begin, end - begin, tuple(positions), span.shard_size, span.etag)


def crc32c_of(data: Buffer) -> int:
    """Return the CRC-32C of a buffer."""
    return crc32c.crc32c(data)


def check_unchanged(span: Span | RangeRequest, fetched: Fetched) -> None:
    """Raise when the shard of a range was replaced since it was indexed; what is not known is not compared."""
    if fetched.object_size is not None and span.shard_size is not None and fetched.object_size < span.shard_size:
        return  # cut short, not replaced: the checksum of each sample tells which of them are still whole
    check_unchanged_object(join_url(span.root, span.path), (span.shard_size, span.etag), fetched)


def check_unchanged_object(url: str, expected: tuple[int | None, str | None], fetched: Fetched) -> None:
    """Raise when an object has another size or etag than expected."""
    size, etag = expected
    differences = []
    if None not in (size, fetched.object_size) and size != fetched.object_size:
        differences.append(f"{fetched.object_size} bytes instead of {size}")
    # Without their quotes: stores and manifests differ in keeping them.
    if etag is not None and fetched.etag is not None and etag.strip('"') != fetched.etag.strip('"'):
        differences.append(f"etag {fetched.etag} instead of {etag}")
    if differences:
        raise ChangedObjectError(
            f"{url} is not the shard that its manifest describes: "
            f"{' and '.join(differences)}. Its index would point at wrong bytes, so nothing of it is used. "
            f"Restore the shard, or write index and manifest again."
        )


def open_sample(span: Span, data: memoryview) -> dict[str, memoryview] | BadSampleError:
    """Return each member's content as a view of the span's bytes, or what is wrong with them."""
    if _is_nowhere(span):
        return _bad(
            span,
            "member_outside_span",
            "no shard has such a place, so the sample is left out. The index is damaged; index the shard again.",
        )
    if len(data) < span.size:
        return _bad(
            span,
            "truncated",
            f"only {len(data)} of {span.size} are there, so the sample is left out. "
            f"The shard was cut short; copy or write it again.",
        )
    if span.crc32c is not None and (crc := crc32c.crc32c(data)) != span.crc32c:
        return _bad(
            span,
            "crc_mismatch",
            f"crc32c is {crc:08x} where the index says {span.crc32c:08x}, also when read again, so the sample is "
            f"left out. The shard is damaged or was changed after indexing; copy or write it again.",
        )
    found = {}
    for name, offset, length in span.members:
        begin = offset - span.offset
        if begin < 0 or length < 0 or begin + length > span.size:
            return _bad(
                span,
                "member_outside_span",
                f"member '{name}' lies at {offset}..{offset + length}, outside of its sample, so the sample is left "
                f"out. The index is damaged; index the shard again.",
            )
        found[name] = data[begin : begin + length]
    return found


def _is_nowhere(span: Span) -> bool:
    """Tell whether a range cannot be one of a sample: it would be asked for in more parts than memory holds."""
    return span.offset < 0 or not 0 <= span.size <= _MAX_SPAN


def _bad(span: Span, reason: str, detail: str) -> BadSampleError:
    place = f"bytes {span.offset}..{span.offset + span.size} of {join_url(span.root, span.path)}"
    return BadSampleError("read", reason, f"{place}: {detail}")
