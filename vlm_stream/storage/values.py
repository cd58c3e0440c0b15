"""The values that enter and leave storage: where bytes lie, and what a store says of an object.

Members and spans are tuples: one of each is made for everything that is read, and a frozen dataclass takes three times
as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Member", "ObjectInfo", "Span"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of one object."""

    path: str
    """Relative to the store's root."""
    size: int
    etag: str | None


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
    """Each a `Member`, or as plain as one: most are looked at once, where they are cut."""
    shard_size: int | None = None
    """Size of the whole shard as the manifest has it; a different one means that the object was replaced."""
    etag: str | None = None
