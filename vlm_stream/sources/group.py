"""Several sources as one, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.sources.record import Record, RecordSource

__all__ = ["SourceGroup"]


class SourceGroup:
    """The records of several sources after each other. Records keep the names of their own sources."""

    def __init__(self, members: Sequence[RecordSource], *, name: str) -> None:
        """Join the members; their names must differ, because ledgers and shards tell records apart by them."""
        names = [member.name for member in members]
        for member in names:
            if names.count(member) > 1:
                raise SourceError(
                    f"two sources are called '{member}', so their records could not be told apart; rename one."
                )
        self.name = name
        self.members = tuple(members)
        self._ends = np.cumsum([len(member) for member in members], dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of records, bad ones included."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of records by source name."""
        return {member.name: len(member) for member in self.members}

    def read(self, index: int) -> Record:
        """Return one record of one member."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of source '{self.name}', which has {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        begin = int(self._ends[which - 1]) if which else 0
        return self.members[which].read(index - begin)
