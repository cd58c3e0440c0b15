"""A span's bytes -> its members, or the reason why they cannot be used. No I/O, no tar headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import crc32c

from vlm_stream.errors import BadSampleError, ChangedObjectError
from vlm_stream.storage.url import join_url

if TYPE_CHECKING:
    from vlm_stream.storage.coalesce import RangeRequest
    from vlm_stream.storage.store import Buffer, Fetched
    from vlm_stream.storage.values import Span

__all__ = ["check_unchanged", "check_unchanged_object", "crc32c_of", "open_sample"]


def crc32c_of(data: Buffer) -> int:
    """Return the CRC-32C of a buffer."""
    return crc32c.crc32c(data)


def check_unchanged(span: Span | RangeRequest, fetched: Fetched) -> None:
    """Raise when the shard of a range was replaced since it was indexed; what is not known is not compared."""
    if fetched.object_size != span.shard_size or fetched.etag != span.etag:
        if fetched.object_size is not None and span.shard_size is not None and fetched.object_size < span.shard_size:
            return  # cut short, not replaced: the checksum of each sample tells which of them are still whole
        check_unchanged_object(join_url(span.root, span.path), (span.shard_size, span.etag), fetched)


def check_unchanged_object(url: str, expected: tuple[int | None, str | None], fetched: Fetched) -> None:
    """Raise when an object has another size or etag than expected."""
    size, etag = expected
    differences = []
    if None not in (size, fetched.object_size) and size != fetched.object_size:
        differences.append(f"{fetched.object_size} bytes instead of {size}")
    if None not in (etag, fetched.etag) and _bare(etag) != _bare(fetched.etag):
        differences.append(f"etag {fetched.etag} instead of {etag}")
    if differences:
        raise ChangedObjectError(
            f"{url} is not the shard that its manifest describes: "
            f"{' and '.join(differences)}. Its index would point at wrong bytes, so nothing of it is used. "
            f"Restore the shard, or write index and manifest again."
        )


def open_sample(span: Span, data: memoryview) -> dict[str, memoryview] | BadSampleError:
    """Return each member's content as a view of the span's bytes, or what is wrong with them."""
    _, _, base, size, expected, members, _, _ = span
    if len(data) < size:
        return _bad(
            span,
            "truncated",
            f"only {len(data)} of {size} are there, so the sample is left out. "
            f"The shard was cut short; copy or write it again.",
        )
    if expected is not None:
        crc = crc32c.crc32c(data)
        if crc != expected:
            return _bad(
                span,
                "crc_mismatch",
                f"crc32c is {crc:08x} where the index says {expected:08x}, also when read again, so the sample is "
                f"left out. The shard is damaged or was changed after indexing; copy or write it again.",
            )
    found = {}
    for name, offset, length in members:
        begin = offset - base
        if begin < 0 or begin + length > size:
            return _bad(
                span,
                "member_outside_span",
                f"member '{name}' lies at {offset}..{offset + length}, outside of its sample, so the sample is left "
                f"out. The index is damaged; index the shard again.",
            )
        found[name] = data[begin : begin + length]
    return found


def _bad(span: Span, reason: str, detail: str) -> BadSampleError:
    place = f"bytes {span.offset}..{span.offset + span.size} of {join_url(span.root, span.path)}"
    return BadSampleError("read", reason, f"{place}: {detail}")


def _bare(etag: str | None) -> str:
    """Return an etag without its quotes: stores and manifests differ in keeping them."""
    return (etag or "").strip('"')
