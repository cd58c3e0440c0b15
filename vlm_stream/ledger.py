"""The ledger: what was bad, where, at which stage and why.

Enters: bad samples, as frozen values. Leaves: counts by reason, JSON lines. It knows nothing of shards, plans or
processors; whoever meets a bad sample fills in what it knows of the place.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from vlm_stream.errors import BadBudgetError, ConfigError, clean, shorten

logger = logging.getLogger(__name__)

_TOLD: Final = 10
"""How many of the newest stand in a message."""
_ENDS: Final = str.maketrans({"\n": "\\n", "\t": "\\t"})
_NAME_CHARACTERS: Final = 500
"""Of an id or a path: records may hold anything there."""


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
    origin: str = ""
    """Where the record stands in the input, while that is known: its file and its place there."""

    def __post_init__(self) -> None:
        """Keep texts short and without secrets; spell what a terminal would obey and what UTF-8 cannot hold."""
        object.__setattr__(self, "detail", shorten(self.detail))
        for name in ("source", "sample", "detail", "shard", "entry", "id", "origin"):
            text = getattr(self, name)
            if name != "detail":
                text = shorten(text, _NAME_CHARACTERS)
            # One line, whatever stands in it.
            object.__setattr__(self, name, text if text.isprintable() else clean(text).translate(_ENDS))

    def to_json(self) -> str:
        """Return one line of the ledger's JSONL form; places that are not known are left out."""
        known = {k: v for k, v in asdict(self).items() if v not in ("", -1)}
        return json.dumps(known, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> BadSample:
        """Return what `to_json` wrote."""
        return cls(**json.loads(line))

    def __str__(self) -> str:
        origin = f" ({self.origin})" if self.origin not in ("", self.sample) else ""
        detail = self.detail.removeprefix(f"{self.origin}: ")
        place = f" in {self.shard}" + (f" at byte {self.offset}" if self.offset >= 0 else "") if self.shard else ""
        own = " ".join(filter(None, (self.entry, self.id)))
        name = f"{self.sample} ({own})" if own else self.sample
        return f"{self.source}: {name}{origin}{place}: {self.stage}: {self.reason}: {detail}"


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

    def append_to(self, path: Path) -> None:
        """Append a line to a file for each bad sample from here on.

        Raises:
            ConfigError: No file can be written there, which is better known before the run than in it.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError(
                f"the ledger {path} cannot be written ({error.strerror or error}), so bad samples would be named "
                f"nowhere; choose another ledger_path, or leave it out"
            ) from error
        self.path = path

    @property
    def num_bad(self) -> int:
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
        lines = [f"{self.num_bad} of {self.num_seen} samples were bad"]
        lines += [f"  {count} x {reason}" for reason, count in self.by_reason().items()]
        lines += [f"  {bad}" for bad in list(self.newest)[-_TOLD:]]
        return "\n".join(lines)

    def extend(self, bads: Iterable[BadSample]) -> None:
        for bad in bads:
            self.add(bad)

    def by_reason(self) -> dict[str, int]:
        """Return `{"stage: reason": count}`, most frequent first."""
        return {f"{stage}: {reason}": n for (stage, reason), n in self.counts.most_common()}

    def to_dict(self) -> dict[str, Any]:
        return {"seen": self.num_seen, "bad": self.num_bad, "by_reason": self.by_reason()}
