"""The compare page: two plans of the same data side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vlm_stream.view import plots
from vlm_stream.view.frame import LiveLinks, document, note
from vlm_stream.view.html import Html, table, tag
from vlm_stream.view.page_step import legend, named_row, settings_fields

if TYPE_CHECKING:
    from vlm_stream.view.comparison import Compared
    from vlm_stream.view.steps import Settings

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
_WAITS: Final = {"step": "once a step", "micro": "at each micro-batch"}


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
    for title, name in (("language model", "llm"), ("vision tower", "vit")):
        for where, waits in _WAITS.items():
            above = [getattr(each, f"{name}_imbalance_{where}") - 1 for each in reports]
            best = f"how far the busiest rank is above the mean, where ranks wait {waits}; 0 is even"
            drawn.append(meter(f"Imbalance, {title}, {waits}", above, "+.2%", best))
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
            *(named_row(row, place, LiveLinks()) for place, row in enumerate(each.packs)),
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
