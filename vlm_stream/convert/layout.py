"""Names of what a conversion writes, and of the members of a sample.

Enters: numbers and names. Leaves: names. Nothing here touches a store.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "JOB_FILE",
    "JOB_FOLDER",
    "LEDGER",
    "part_name",
    "sample_key",
    "shard_name",
    "split_member_name",
]

LEDGER: Final = "ledger.jsonl"
JOB_FOLDER: Final = ".job"
"""What an unfinished conversion remembers; gone once the manifest is written."""
JOB_FILE: Final = f"{JOB_FOLDER}/job.json"


def shard_name(number: int) -> str:
    """Return the tar's name.

    >>> shard_name(7)
    'shard-000007.tar'
    """
    return f"shard-{number:06d}.tar"


def part_name(number: int) -> str:
    """Return the name of the note that shard `number` is finished."""
    return f"{JOB_FOLDER}/shard-{number:06d}.json"


def sample_key(record: int) -> str:
    """Return a sample's key: its record's number in the input, whatever the shuffle; no dot, sortable.

    >>> sample_key(41)
    '000000041'
    """
    return f"{record:09d}"


def split_member_name(name: str) -> tuple[str, str]:
    """Split a tar member's name into key and extension, at the first dot of the last path component.

    >>> split_member_name("a.b/0001.seg.png")
    ('a.b/0001', 'seg.png')
    >>> split_member_name("README")
    ('README', '')
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension
