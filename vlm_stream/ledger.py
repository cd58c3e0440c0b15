"""The ledger: what was bad, where, at which stage and why.

Enters: bad samples, as frozen values. Leaves: counts by reason, JSON lines. It knows nothing of shards, plans or
processors; whoever meets a bad sample fills in what it knows of the place.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import BadBudgetError, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["BadSample", "Ledger"]

logger = logging.getLogger(__name__)

_TOLD: Final = 10
"""How many of the newest stand in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """One sample that could not be used."""

    source: str
    """Name of the source (the meta file's entry, or the dataset in a mixture)."""
    sample: str
    """The sample's id or key; `file:line` when it never got one."""
    stage: str
    """`convert`, `read`, `decode`, `encode` or `fit`."""
    reason: str
    """Short stable code to count by."""
    detail: str
    """One sentence about this very sample."""
    shard: str = ""
    """The shard's file name, once the sample lies in one."""
    offset: int = -1
    """Byte offset in the shard."""
    entry: str = ""
    """The meta file's entry, once the sample lies in a shard."""
    id: str = ""
    """Its own id, where `sample` is its key."""

    def __post_init__(self) -> None:
        """Keep the sentence short, and spell what UTF-8 cannot hold: names in tars, halves of surrogate pairs."""
        object.__setattr__(self, "detail", shorten(self.detail))
        for name in ("source", "sample", "detail", "shard", "entry", "id"):
            text = getattr(self, name)
            if not text.isascii():
                object.__setattr__(self, name, text.encode("utf-8", "backslashreplace").decode("utf-8"))

    def to_json(self) -> str:
        """Return one line of the ledger's JSONL form; places that are not known are left out."""
        known = {k: v for k, v in asdict(self).items() if v not in ("", -1)}
        return json.dumps(known, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> BadSample:
        """Read a line that `to_json` wrote."""
        return cls(**json.loads(line))

    def __str__(self) -> str:
        """Return the form in which people read it in a log."""
        place = f" in {self.shard}" + (f" at byte {self.offset}" if self.offset >= 0 else "") if self.shard else ""
        own = " ".join(filter(None, (self.entry, self.id)))
        name = f"{self.sample} ({own})" if own else self.sample
        return f"{self.source}: {name}{place}: {self.stage}: {self.reason}: {self.detail}"


class Ledger:
    """Counts bad samples by reason, keeps the newest, writes all of them to a file if told to, and enforces a budget.

    The budget is a rate: an error is raised once more than `max_rate` of the samples seen so far were bad, but never
    before `min_bad` of them, so that one bad sample at the start of a run does not end it.
    """

    def __init__(self, *, max_rate: float | None = None, min_bad: int = 10, keep: int = 1000) -> None:
        """Start empty; without a rate the ledger only counts."""
        self.path: Path | None = None
        """Where a line of JSON is appended for each bad sample."""
        self.max_rate = max_rate
        self.min_bad = min_bad
        self.num_seen = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        self.newest: deque[BadSample] = deque(maxlen=keep)

    @property
    def num_bad(self) -> int:
        """Return how many samples were bad."""
        return self.counts.total()

    def saw(self, num_samples: int = 1) -> None:
        """Count samples that passed, good or bad."""
        self.num_seen += num_samples

    def add(self, bad: BadSample) -> None:
        """Record one bad sample; raise `BadBudgetError` when that is more than the budget allows."""
        self.counts[bad.stage, bad.reason] += 1
        self.newest.append(bad)
        if self.path is not None:
            self._write(bad)
        if self.max_rate is None or self.num_bad < self.min_bad:
            return
        if self.num_bad > self.max_rate * max(self.num_seen, 1):
            reasons = "\n  ".join(f"{count} x {reason}" for reason, count in self.by_reason().items())
            newest = "\n  ".join(map(str, list(self.newest)[-_TOLD:]))
            raise BadBudgetError(
                f"{self.num_bad} of {self.num_seen} samples were bad, more than the budget of {self.max_rate:.2%}; "
                f"the run stops so that it does not train on what is left. Mend the data (where all have one reason, "
                f"look at the processor first) or raise bad_budget. The reasons:\n  {reasons}\nThe newest:\n  {newest}"
            )

    def _write(self, bad: BadSample) -> None:
        """Append a line; a file that cannot be written must not end a run, and is said once."""
        path, text = self.path, bad.to_json() + "\n"
        try:
            with path.open("a", encoding="utf-8") as file:  # type: ignore[union-attr]
                file.write(text)
        except OSError as error:
            self.path = None
            logger.warning(
                "the ledger %s cannot be written (%s), so bad samples are only counted and kept in memory from here on",
                path,
                error.strerror,
            )

    def __repr__(self) -> str:
        """Return how many samples were bad, why, and which ones came last."""
        lines = [f"{self.num_bad} of {self.num_seen} samples were bad"]
        lines += [f"  {count} x {reason}" for reason, count in self.by_reason().items()]
        lines += [f"  {bad}" for bad in list(self.newest)[-_TOLD:]]
        return "\n".join(lines)

    def extend(self, bads: Iterable[BadSample]) -> None:
        """Record several."""
        for bad in bads:
            self.add(bad)

    def by_reason(self) -> dict[str, int]:
        """Return `{"stage: reason": count}`, most frequent first."""
        return {f"{stage}: {reason}": n for (stage, reason), n in self.counts.most_common()}

    def to_dict(self) -> dict[str, Any]:
        """Return seen, bad and counts as JSON values."""
        return {"seen": self.num_seen, "bad": self.num_bad, "by_reason": self.by_reason()}
