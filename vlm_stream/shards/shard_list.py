"""The shards that a manifest lists, column by column.

A manifest may list a hundred thousand shards, of which a run that begins looks at a few hundred: entries are made of
the columns when they are asked for. In JSON the columns take a third of the bytes, and of the time to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import reduce
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any, Final, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["ShardEntry", "ShardList", "Totals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What one shard, or all of them, adds up to."""

    samples: int = 0
    bytes: int = 0
    """Size of the tar."""
    text_tokens: int = 0
    label_tokens: int = 0
    """Of the samples for which they are known."""
    text_only: int = 0
    """Samples without any medium."""
    images: int = 0
    image_pixels: int = 0
    videos: int = 0
    video_frames: int = 0
    video_seconds: float = 0.0
    audios: int = 0
    audio_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard, as the manifest lists it."""

    name: str
    """Relative to the dataset's root, or to `Manifest.tars`."""
    totals: Totals
    crc32c: int
    """Of the tar."""
    index_sha256: str
    etag: str | None = None
    """What the store called this very object, where the store is remote."""


_OWN: Final = ("name", "crc32c", "index_sha256", "etag")
_TOTALS: Final = tuple(field.name for field in fields(Totals))


class ShardList(Sequence[ShardEntry]):
    """Entries of shards, in order."""

    __slots__ = ("_columns",)

    def __init__(self, columns: Mapping[str, list[Any] | Callable[[], list[Any]]]) -> None:
        """Take a list of values for every field of an entry and of its totals, or what reads it when it is asked for.

        Raises:
            KeyError, TypeError: They are not these fields, or not lists of one length.
        """
        if odd := set(columns) ^ {*_OWN, *_TOTALS}:
            raise KeyError(", ".join(sorted(odd)))
        known = [column for column in columns.values() if not callable(column)]
        if not all(isinstance(column, list) for column in known) or len(set(map(len, known))) > 1:
            raise TypeError("the columns of the shards are not lists of one length")
        self._columns = {name: columns[name] for name in (*_OWN, *_TOTALS)}

    @classmethod
    def of(cls, entries: Iterable[ShardEntry]) -> ShardList:
        """Take entries apart."""
        each = list(entries)
        own = {name: list(map(attrgetter(name), each)) for name in _OWN}
        return cls(own | {name: list(map(attrgetter(f"totals.{name}"), each)) for name in _TOTALS})

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.column("name"))

    @overload
    def __getitem__(self, place: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, place: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        """Return one entry, or some of them."""
        if isinstance(place, slice):
            return tuple(self[number] for number in range(len(self))[place])
        totals = Totals(**{name: self.column(name)[place] for name in _TOTALS})
        return ShardEntry(totals=totals, **{name: self.column(name)[place] for name in _OWN})

    def __eq__(self, other: object) -> bool:
        """Tell whether all entries are equal."""
        return isinstance(other, ShardList) and self.columns() == other.columns()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return the entries."""
        return f"ShardList.of({list(self)!r})"

    def column(self, name: str) -> list[Any]:
        """Return one field of all entries or of their totals."""
        column = self._columns[name]
        if not isinstance(column, list):
            column = self._columns[name] = column()
        return column

    def columns(self) -> dict[str, list[Any]]:
        """Return all of them: what `__init__` takes."""
        return {name: self.column(name) for name in self._columns}

    def totals(self) -> Totals:
        """Add field by field, from the first to the last (`sum` rounds floats otherwise in newer Pythons)."""
        zeros = asdict(Totals())
        return Totals(**{name: reduce(add, self.column(name), zeros[name]) for name in _TOTALS})

    def without_etags(self) -> ShardList:
        """Return the same shards as they are elsewhere."""
        return ShardList(self._columns | {"etag": [None] * len(self)})
