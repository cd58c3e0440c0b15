"""A record: one sample before it lies in a shard; the seam through which converters read records; sources joined.

A source is random-access by design: a converter decides which record goes into which shard on numbers alone, and each
of its workers reads just the records of its own shards. A source may have more than it must: `block_ends` says where
blocks end whose records are cheap only together (row groups of Parquet), and a converter that shuffles keeps them
together; `digest()` changes with what it reads, `origin(i)` is the place of a record that cannot be read, `line` says
what was recognised, `form` how records are mapped.
"""

import posixpath
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vlm_stream.conversation import Conversation
from vlm_stream.errors import SourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One conversation with the places of its media."""

    source: str
    """Name of the meta file's entry, or of the file."""
    id: str
    """The sample's own id if it has one, else its number in the source."""
    origin: str
    """For people: file and line, array index, or row group and row; and the sample's own id."""
    conversation: Conversation
    """Media items name a path, a URL, an LMDB entry, or hold bytes."""
    media_root: str | None = None
    """Folder that relative media paths were resolved against."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Known passengers: `mm_inputs_meta`, `_text_tokens`, `_media_tokens`, `_mismatches`."""
    has_id: bool = True
    """Whether the id is the sample's own."""

    @property
    def own_id(self) -> str | None:
        """Return the id that the sample brought along; None: it has none."""
        return self.id if self.has_id and self.id else None


class RecordSource(Protocol):
    """Records by number. Picklable: workers get their own copy."""

    name: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> Record:
        """Return one record; raise `BadSampleError` when it cannot be mapped."""


class SourceGroup:
    """The records of several sources after each other. Records keep the names of their own sources."""

    def __init__(self, members: Sequence[RecordSource], *, name: str) -> None:
        """Join the members; their names must differ, because ledgers and shards tell records apart by them."""
        for member, count in Counter(each.name for each in members).items():
            if count > 1:
                raise SourceError(
                    f"two sources are called '{member}', so their records could not be told apart; rename one."
                )
        self.name = name
        self.members = tuple(members)
        self._ends = np.cumsum([len(member) for member in members], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def counts(self) -> dict[str, int]:
        """Return how many records each member has, by its name."""
        return {member.name: len(member) for member in self.members}

    @property
    def lines(self) -> dict[str, str]:
        """Return what was recognised, in a line for each source that says it."""
        return {member.name: line for member in self.members if (line := getattr(member, "line", ""))}

    @property
    def block_ends(self) -> npt.NDArray[np.int64] | None:
        """Return where the blocks of all members end; None where no member has any."""
        ends = [getattr(member, "block_ends", None) for member in self.members]
        if all(own is None for own in ends):
            return None
        sizes = [len(member) for member in self.members]
        own = [np.arange(1, size + 1) if end is None else end for end, size in zip(ends, sizes, strict=True)]
        return np.concatenate([end + begin for end, begin in zip(own, [0, *self._ends[:-1].tolist()], strict=True)])

    def locate(self, index: int) -> tuple[RecordSource, int]:
        """Return the source of a record, and its number in that."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of source '{self.name}', which has {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.members[which], index - (int(self._ends[which - 1]) if which else 0)

    def read(self, index: int) -> Record:
        """Return one record; raise `BadSampleError` when it cannot be mapped."""
        source, number = self.locate(index)
        return source.read(number)


def is_url(path: str) -> bool:
    """Tell whether the path names its own store or carries its own bytes (`s3://...`, `file:///...`, `data:...`)."""
    return "://" in path or path.startswith("data:")


def join_media_path(media_dir: str | None, path: str) -> str:
    """Return the path below `media_dir` when it is relative; LMDB entries (`env::key`) are paths like any other.

    >>> join_media_path("s3://bucket/coco", "a/1.jpg")
    's3://bucket/coco/a/1.jpg'
    """
    if not media_dir or is_url(path) or posixpath.isabs(path):
        return path
    return posixpath.join(media_dir, path)


def parent_of(path: str) -> str:
    """Return the folder or URL that holds the file; "" is the working directory."""
    return path.rpartition("/")[0] if is_url(path) else posixpath.dirname(path)


def absolute(path: str) -> str:
    """Return a path that means the same from any working directory, as other processes may have another."""
    return path if is_url(path) else str(Path(path).absolute())
