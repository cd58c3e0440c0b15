"""The questions of the comparison, a module for one or a few: how it is measured, its rows, what explains them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from benchmarks.peers.suite import Suite

__all__ = ["QUESTIONS", "Prices", "Question", "Row", "check_same", "each", "rates"]

Results = dict[str, Any]
OURS = "vlm_stream"


@dataclass(frozen=True)
class Prices:
    """What is paid, in dollars."""

    core_hour: float = 0.04
    gigabyte: float = 0.02
    """Fetched from the object store."""
    thousand_requests: float = 0.0004
    """To it."""


@dataclass(frozen=True)
class Row:
    """A line of a table: a cell for each way that was measured."""

    title: str
    cells: dict[str, str]
    short: str = ""
    """Its title in the README; empty: it is not shown there."""


@dataclass(frozen=True)
class Question:
    """What a user asks."""

    title: str
    why: str
    """What explains the result, in a sentence or two."""
    measure: Callable[[Suite], Results]
    rows: Callable[[Results, Results, Prices], Iterable[Row]]
    """Of what was found, of all questions' results, and prices."""
    head: str = ""
    """What stands above the table."""


def rates(found: Mapping[str, Any], number: Callable[[Any], float], form: str = "{:,.0f}") -> dict[str, str]:
    """Return medians with half their spread, and in brackets how often a cell goes into ours."""
    middle: dict[str, float] = {}
    cells: dict[str, str] = {}
    for way, runs in found.items():
        if (bad := _bad(runs)) is not None:
            cells[way] = bad
            continue
        values = [number(run) for run in runs]
        middle[way] = statistics.median(values)
        cells[way] = form.format(middle[way])
        if len(values) > 1 and middle[way]:
            cells[way] += f" ±{(max(values) - min(values)) / 2 / middle[way]:.0%}"
    for way, value in middle.items():
        if value and OURS in middle and not way.startswith(OURS):
            cells[way] += f" ({middle[OURS] / value:.1f}x)"
    return cells


def each(found: Mapping[str, Any], text: Callable[[Any], str]) -> dict[str, str]:
    """Return what is said of the first run of each way."""
    return {way: _bad(runs) or text(runs[0] if isinstance(runs, list) else runs) for way, runs in found.items()}


def _bad(runs: Any) -> str | None:
    runs = runs if isinstance(runs, list) else [runs]
    if any("error" in run for run in runs):
        return "fails"
    return "-" if not runs or any("cannot" in run for run in runs) else None


def check_same(found: dict[str, list[Results]], expected: Mapping[str, int], *, whole: bool) -> None:
    """Compare what each way delivered with what is expected; other tokens or a repeated key is an error.

    Args:
        found: Runs with `samples`, which are replaced by how many there were.
        expected: The tokens of every key.
        whole: Whether it was a whole epoch; what is missing is then counted.
    """
    for runs in found.values():
        for run in runs:
            samples = run.pop("samples", [])
            if "error" in run or "cannot" in run:
                continue
            keys = {key for key, _ in samples}
            other = [key for key, length in samples if expected.get(key) != length]
            run["delivered"] = len(samples)
            if other:
                run["error"] = f"not the same work: sample {other[0]} and {len(other) - 1} more have other tokens"
            elif len(keys) != len(samples):
                run["error"] = f"not the same work: {len(samples) - len(keys)} samples came twice"
            elif whole and len(keys) < len(expected):
                run["missing"] = len(expected) - len(keys)


@dataclass
class _Questions:
    """Questions by name; a module is imported when its question is asked for."""

    homes: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Question:
        return getattr(import_module(f"{__name__}.{self.homes[name]}"), name.upper())  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self.homes)

    def __contains__(self, name: object) -> bool:
        return name in self.homes


QUESTIONS = _Questions(
    {
        "core": "throughput",
        "clips": "throughput",
        "s3": "throughput",
        "memory": "large",
        "start": "large",
        "resume": "resume",
        "packing": "packing",
        "faults": "faults",
        "ray": "throughput",
        "cost": "cost",
        "growth": "growth",
    }
)
