"""The compare page: two plans of the same data side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vlm_stream.plan import plan_report
from vlm_stream.view import plots
from vlm_stream.view.frame import LiveLinks, document, note
from vlm_stream.view.html import Html, table, tag
from vlm_stream.view.page_step import legend, named_row, settings_fields
from vlm_stream.view.rows import StepReader

if TYPE_CHECKING:
    from vlm_stream.plan import PlanReport, Step
    from vlm_stream.view.rows import Row
    from vlm_stream.view.steps import PlanBook, Settings

_FIGURES: Final = (
    ("steps looked at", "steps"),
    ("samples in them", "samples"),
    ("tokens in them", "tokens"),
    ("rows", "packs"),
    ("fewest rows possible", "packs_lower_bound"),
    ("shards that a window takes from", "live_shards"),
    ("variance inflation", "variance_inflation"),
    ("bytes of the state", "state_bytes"),
)
_WAITS: Final = (("step", "step", "once a step"), ("micro", "micro-batch", "at each micro-batch"))
_MAX_ROWS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of the plans that are compared."""

    settings: Settings
    report: PlanReport
    rows: tuple[Row, ...]
    """The first ones of rank 0."""


def compare(book: PlanBook, settings: Settings, max_steps: int) -> Compared:
    """Return a plan in numbers, and its first rows; kept, as one plan is compared with many."""
    walk = book.walk(settings)
    kept: Compared | None = walk.compared.get(max_steps)
    if kept is not None:
        return kept
    reader = StepReader(book.catalog, walk, None)
    rows: list[Row] = []

    def see(step: Step) -> None:
        for micro in range(step.numbers().shape[0] if len(rows) < _MAX_ROWS else 0):
            rows.extend(reader.rows(step, 0, micro))

    report = plan_report(walk.plan.after(0).planner, walk.shape, max_steps=max_steps, see=see)
    found = Compared(settings=settings, report=report, rows=tuple(rows[:_MAX_ROWS]))
    walk.compared = {max_steps: found}
    return found


def compare_page(settings: tuple[Settings, Settings], found: tuple[Compared, Compared] | None, max_steps: int) -> Html:
    """Return the form of two plans, and what they come to where it was sent."""
    columns = [
        tag("fieldset", tag("legend", f"Plan {name}"), *settings_fields(each, f"_{name.lower()}"))
        for name, each in zip("AB", settings, strict=True)
    ]
    steps = tag("label", "steps to look at", tag("input", name="steps", value=max_steps, type="number", min=1))
    form = tag(
        "form",
        tag("div", *columns),
        steps,
        tag("button", "Compare", class_="main"),
        action="/compare",
        class_="filters compare",
    )
    body = note("Change one of the plans, and compare.") if found is None else _compared(found)
    return document("Compare", tag("h1", "Two plans"), form, body, here="compare")


def _compared(found: tuple[Compared, Compared]) -> Html:
    names = [f"{letter}: {_what_differs(each, found)}" for letter, each in zip("AB", found, strict=True)]
    reports = [each.report for each in found]

    def meter(title: str, values: list[float], shown: str, best: str, most: float | None = None) -> Html:
        rows = [(who, each, format(each, shown)) for who, each in zip("AB", values, strict=True)]
        return plots.meter(title, rows, best, most)

    drawn = [
        meter("Full", [each.fill for each in reports], ".2%", "share of token slots that hold tokens, of 100 %", 1.0),
        meter("Steps in an epoch", [each.steps_per_epoch for each in reports], ",.1f", "optimizer steps"),
    ]
    for title, name in (("Language model", "llm"), ("Vision tower", "vit")):
        for span, where, waits in _WAITS:
            above = [getattr(each, f"{name}_imbalance_{span}") - 1 for each in reports]
            best = f"how far the busiest rank is above the mean, where ranks wait {waits}; 0 is even"
            drawn.append(meter(f"{title}: imbalance by {where}", above, "+.2%", best))
    rows = [[title, *(f"{getattr(report, name):,.6g}" for report in reports)] for title, name in _FIGURES]
    rows.append(
        [
            "left out",
            *(", ".join(f"{n:,} {reason}" for reason, n in each.dropped.items()) or "none" for each in reports),
        ]
    )
    strips = [
        tag(
            "div",
            tag("h3", name),
            *(named_row(row, place, LiveLinks()) for place, row in enumerate(each.rows)),
            class_="panel",
        )
        for name, each in zip(names, found, strict=True)
    ]
    return tag(
        "div",
        tag("div", *drawn, class_="plots"),
        tag("h2", "The first rows of rank 0"),
        legend(is_built=False, says=["Every document is a link."]),
        tag("div", *strips, class_="plots"),
        tag("h2", "In numbers"),
        tag("div", table(["", *names], rows), class_="panel numbers"),
    )


def _what_differs(one: Compared, found: tuple[Compared, Compared]) -> str:
    first, second = (each.settings.named() for each in found)
    own = one.settings.named()
    return (
        ", ".join(f"{key.replace('_', ' ')} {own[key]}" for key in own if first[key] != second[key]) or "the same plan"
    )
