"""Which sample stands in for a bad one, and the note of it.

Enters: an index whose sample could not be used. Leaves: another index, drawn from a generator that is keyed by the
index and the attempt alone, so that any number of workers, in any order, after any restart, draws the same; and a line
in the ledger, because what is replaced is lost otherwise.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import BadSampleError
from vlm_stream.ledger import BadSample, Ledger
from vlm_stream.plan import Key, words

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Replacer", "replacement_index"]

logger = logging.getLogger(__name__)


def replacement_index(index: int, attempt: int, count: int, *, seed: int = 0, purpose: str = "replace") -> int:
    """Return another index than `index` of `range(count)`; the same one for the same arguments, always."""
    if count < 2:
        return index
    word = words(Key(seed=seed, purpose=purpose, epoch=attempt, index=index), 1)[0]
    return (index + 1 + int(word) % (count - 1)) % count


@dataclass(slots=True, kw_only=True)
class Replacer:
    """Tries an item, then others in its place, and records each that failed."""

    source: str
    """Who asks, for the ledger and the log."""
    max_retries: int = 10
    """Attempts in all."""
    seed: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    """What failed in this process."""
    ledger_path: str | None = None
    """File to which every process appends what failed, a JSON line each; a worker's own ledger dies with it."""

    def fetch(self, load: Callable[[int], Any], index: int, count: int) -> Any:
        """Return `load(index)`, or that of another index if it fails.

        Raises:
            RuntimeError: All attempts failed; the last error is its cause.
        """
        place, error = index, None
        for attempt in range(self.max_retries):
            self.ledger.saw()
            try:
                return load(place)
            except Exception as caught:  # datasets raise anything
                error = caught
                self.note(str(place), caught)
            place = replacement_index(index, attempt, count, seed=self.seed)
        raise RuntimeError(
            f"Failed to load a valid sample after {self.max_retries} retries for item {index} of {self.source}; the "
            f"last error was {error!r}. Mend the data: its ledger names what failed."
        ) from error

    def note(self, sample: str, error: Exception) -> None:
        """Record one failure."""
        stage, reason = ("read", type(error).__name__)
        if isinstance(error, BadSampleError):
            stage, reason = error.stage, error.reason
        bad = BadSample(source=self.source, sample=sample, stage=stage, reason=reason, detail=str(error))
        logger.warning("%s", bad)
        if self.ledger_path is not None:
            with Path(self.ledger_path).open("a", encoding="utf-8") as lines:
                lines.write(bad.to_json() + "\n")
        self.ledger.add(bad)
