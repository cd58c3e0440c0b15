"""A sample as a fixed set of columns, for writers whose samples must all have the same ones.

One column for each medium a sample may have (empty where it has fewer), one for the text, one for the key and one for
the members' names. A reader of columns cuts each value out of the sample once; members packed into a single column
would be cut, and so copied, a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchmarks.peers.data import Record

__all__ = ["KEY", "NAMES", "TEXT", "from_columns", "media_columns", "to_columns"]

KEY, TEXT, NAMES = "key", "json", "names"


def media_columns(records: Iterable[Record]) -> list[str]:
    """Return the columns that hold the media of the sample with the most of them."""
    return [f"media{place}" for place in range(max((len(record.media) for record in records), default=0))]


def to_columns(record: Record, media: list[str]) -> dict[str, Any]:
    """Return a record's values by column."""
    values = [path.read_bytes() for _, path in record.media]
    values += [b""] * (len(media) - len(values))
    names = ",".join(name for name, _ in record.media)
    return {KEY: record.key, TEXT: record.text, NAMES: names} | dict(zip(media, values, strict=True))


def from_columns(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a sample that was read, with `__key__`."""
    members = {"__key__": sample[KEY], "json": sample[TEXT]}
    if names := sample[NAMES]:
        for place, name in enumerate(names.split(",")):
            members[name] = sample[f"media{place}"]
    return members
