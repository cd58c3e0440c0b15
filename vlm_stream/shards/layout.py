"""Names: how the objects of a dataset and the members of a sample are called.

Enters: numbers and names. Leaves: names. Nothing here touches a store.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "FIRST_JOINT_INDEX",
    "JOB_FILE",
    "JOB_FOLDER",
    "JOINT_INDEX",
    "LEDGER",
    "MANIFEST",
    "index_name",
    "part_name",
    "sample_key",
    "shard_name",
    "split_member_name",
]

MANIFEST: Final = "dataset.json"
LEDGER: Final = "ledger.jsonl"
JOINT_INDEX: Final = "dataset.indexes.arrow"
"""The indexes of all shards in one, where the dataset is small; no tar's own index can be called so."""
FIRST_JOINT_INDEX: Final = "dataset.indexes.parquet"
"""What it was called in the first format: not read, but removed with the dataset."""
JOB_FOLDER: Final = ".job"
"""What an unfinished conversion remembers; gone once the manifest is written."""
JOB_FILE: Final = f"{JOB_FOLDER}/job.json"


def shard_name(number: int) -> str:
    """Return the tar's name.

    >>> shard_name(7)
    'shard-000007.tar'
    """
    return f"shard-{number:06d}.tar"


def index_name(shard: str) -> str:
    """Return the name of a tar's index, which lies beside it.

    >>> index_name("a/shard-000007.tar")
    'a/shard-000007.index.parquet'
    """
    return f"{shard.removesuffix('.tar')}.index.parquet"


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
