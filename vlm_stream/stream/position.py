"""Where a run stands, for whoever saves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Position"]


class Position:
    """Where a run stands behind a micro-batch: its cursor, written when it is asked for.

    To write one costs more than to plan a micro-batch, and few are asked for. To another process it goes as what it is.
    """

    __slots__ = ("_write",)

    def __init__(self, write: Callable[[], dict[str, Any] | None]) -> None:
        """Keep what writes it."""
        self._write = write

    @classmethod
    def at(cls, cursor: dict[str, Any] | None) -> Position:
        """Return the place of a cursor that is known; None: the start of a run."""
        return cls(lambda: cursor)

    def state(self) -> dict[str, Any] | None:
        """Return the cursor."""
        return self._write()

    def written(self) -> Position:
        """Return the same place with its cursor written, which keeps nothing of the run alive."""
        return Position.at(self.state())

    def __reduce__(self) -> tuple[Any, ...]:
        return Position.at, (self.state(),)
