"""One of two plans that are compared: in numbers, and its first rows.

Enters: settings of a plan. Leaves: `Compared`, plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_stream.plan import plan_report
from vlm_stream.view.rows import StepReader

if TYPE_CHECKING:
    from vlm_stream.plan import PlanReport
    from vlm_stream.view.rows import Row
    from vlm_stream.view.steps import PlanBook, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of the plans that are compared."""

    settings: Settings
    report: PlanReport
    packs: tuple[Row, ...]
    """The first rows of rank 0."""


def compare(book: PlanBook, settings: Settings, max_steps: int, max_rows: int = 8) -> Compared:
    """Return a plan in numbers, and its first rows."""
    walk = book.walk(settings)
    report = plan_report(walk.plan.after(0).planner, walk.shape, max_steps=max_steps)
    reader = StepReader(book.catalog, walk, None)
    rows: list[Row] = []
    for number in range(min(report.steps, max_rows)):
        step = walk.step(number)
        for micro in range(step.numbers().shape[0]):
            rows += reader.rows(step, 0, micro)
        if len(rows) >= max_rows:
            break
    return Compared(settings=settings, report=report, packs=tuple(rows[:max_rows]))
