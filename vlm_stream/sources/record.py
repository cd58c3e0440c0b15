"""A record: one sample before it lies in a shard, and the seam through which converters read records.

A source is random-access by design: a converter decides which record goes into which shard on numbers alone and each of
its workers reads just the records of its own shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vlm_stream.conversation import Conversation

__all__ = ["Record", "RecordSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One conversation with the places of its media."""

    source: str
    """Name of the meta file's entry, or of the file."""
    id: str
    """The sample's own id if it has one, else its number in the source."""
    origin: str
    """`file:line` for people."""
    conversation: Conversation
    """Media items name a path, a URL, an LMDB entry, or hold bytes."""
    media_root: str | None = None
    """Folder that relative media paths were resolved against."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Known passengers, such as `mm_inputs_meta` and `_text_tokens`."""


class RecordSource(Protocol):
    """Records by number. Picklable: workers get their own copy."""

    name: str

    def __len__(self) -> int:
        """Return the number of records, bad ones included."""
        ...

    def read(self, index: int) -> Record:
        """Return one record; raise `BadSampleError` when it cannot be mapped."""
        ...
