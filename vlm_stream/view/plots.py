"""Drawings of pages, as SVG without styles of their own: colours come from the style sheet, by class.

Enters: numbers. Leaves: `Html`. A drawing that stretches has no text in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from vlm_stream.view.html import Html, join, svg, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlm_stream.convert import Histogram

_WIDTH: Final = 400
_HEIGHT: Final = 150
_BELOW: Final = 24
_TICKS: Final = 8
"""Of an axis, at most."""
_STRIP: Final = 1000
_STRIP_HEIGHT: Final = 30


def histogram(shown: Histogram, href: Callable[[int], str] | None = None) -> Html:
    """Return a histogram with its facts; `href` gives where a click on a bin leads."""
    step = _WIDTH / len(shown.counts)
    most = max(shown.counts) or 1
    parts = [tag("line", x1=0, y1=_HEIGHT, x2=_WIDTH, y2=_HEIGHT)]
    for number, count in enumerate(shown.counts):
        height = max(count / most * (_HEIGHT - 18), 1.5 if count else 0.0)
        left, top = number * step, _HEIGHT - height
        place = {"x": f"{left + 1:.1f}", "y": f"{top:.1f}", "width": f"{step - 2:.1f}", "height": f"{height:.1f}"}
        bar = tag("rect", **place, rx=2, class_="bar")
        hover = tag("rect", x=f"{left:.1f}", y=0, width=f"{step:.1f}", height=_HEIGHT, class_="hit")
        told = tag("g", tag("title", f"{shown.label(number)} {shown.unit}: {count:,}"), bar, hover)
        parts.append(tag("a", told, href=href(number)) if href is not None and count else told)
        if count:
            text = _short(count)
            parts.append(tag("text", text, x=f"{left + step / 2:.1f}", y=f"{top - 4:.1f}", text_anchor="middle"))
    last, apart = len(shown.counts), max(-(-len(shown.counts) // _TICKS), 1)
    for number in [*range(0, last - apart // 2, apart), last]:
        anchor = "start" if number == 0 else "end" if number == last else "middle"
        at = {"x": f"{number * step:.1f}", "y": _HEIGHT + 16, "text_anchor": anchor}
        parts.append(tag("text", _short(shown.edges[number]), **at, class_="tick"))
    title = f"{shown.name} ({shown.unit}{', log axis' if shown.is_log else ''})"
    drawn = svg(_WIDTH, _HEIGHT + _BELOW, *parts, label=f"histogram of {title}", class_="histogram")
    return tag("section", tag("h3", title), tag("p", shown.facts, class_="soft"), drawn, class_="plot")


def _short(value: float) -> str:
    """Return a number in a few characters.

    >>> _short(0.784), _short(3.14), _short(142.3), _short(1017), _short(26_400), _short(3_100_000)
    ('0.78', '3.1', '142', '1,017', '26k', '3.1M')
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            scaled = value / min(limit, 1e3) if unit == "k" else value / limit
            return f"{scaled:.{1 if scaled < 10 else 0}f}{unit}"
    if value == int(value) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if value < 1 else 1}f}"


class Piece(NamedTuple):
    """A part of a strip."""

    size: float
    """0: a mark between two others."""
    kind: str
    """Its colour: `text`, `vision`, `label`, `pad`, `hole`."""
    title: str
    href: str | None
    group: int
    """Which document it belongs to."""


def strip(pieces: Sequence[Piece], total: float, label: str) -> Html:
    """Return a row of a batch as a strip of its pieces, over the whole width of the page."""
    scale = _STRIP / max(total, 1)
    parts: list[Html] = [tag("rect", x=0, y=0, width=_STRIP, height=_STRIP_HEIGHT, class_="pad")]
    left, borders = 0.0, []
    for number, piece in enumerate(pieces):
        width = piece.size * scale
        if not piece.size:
            mark = tag("rect", x=f"{max(left - 2, 0):.2f}", y=0, width=4, height=_STRIP_HEIGHT, class_=piece.kind)
            told = tag("g", tag("title", piece.title), mark)
            borders.append(told if piece.href is None else tag("a", told, href=piece.href))
            continue
        rect = tag(
            "rect",
            x=f"{left:.2f}",
            y=0,
            width=f"{max(width, 0.4):.2f}",
            height=_STRIP_HEIGHT,
            class_=f"{piece.kind} {'odd' if piece.group % 2 else 'even'}",
        )
        told = tag("g", tag("title", piece.title), rect)
        parts.append(told if piece.href is None else tag("a", told, href=piece.href))
        left += width
        if number + 1 == len(pieces) or pieces[number + 1].group != piece.group:
            borders.append(tag("rect", x=f"{left - 0.6:.2f}", y=0, width="1.2", height=_STRIP_HEIGHT, class_="edge"))
    return svg(_STRIP, _STRIP_HEIGHT, *parts, *borders, label=label, preserveAspectRatio="none", class_="strip")


def bars(
    values: Sequence[float],
    label: str,
    what: str = "rank",
    chosen: int | None = None,
    href: Callable[[int], str | None] | None = None,
) -> Html:
    """Return a bar for each rank, or what else has a number, and the line of their mean; the chosen one stands out."""
    height = 64
    most = max(values, default=0.0) or 1.0
    step = _STRIP / max(len(values), 1)
    gap = min(step * 0.15, 4.0)
    parts: list[Html] = []
    for number, value in enumerate(values):
        size = value / most * (height - 4)
        hit = tag("rect", x=f"{number * step:.2f}", y=0, width=f"{step:.2f}", height=height, class_="hit")
        bar = tag(
            "rect",
            x=f"{number * step + gap / 2:.2f}",
            y=f"{height - size:.2f}",
            width=f"{step - gap:.2f}",
            height=f"{size:.2f}",
            class_="bar chosen" if number == chosen else "bar",
        )
        told = tag("g", tag("title", f"{what} {number}: {value:,.4g}"), bar, hit)
        target = href(number) if href is not None else None
        parts.append(told if target is None else tag("a", told, href=target))
    mean = sum(values) / max(len(values), 1)
    level = height - mean / most * (height - 4)
    line = tag("line", x1=0, x2=_STRIP, y1=f"{level:.2f}", y2=f"{level:.2f}", class_="mean")
    drawn = svg(_STRIP, height, *parts, line, label=label, preserveAspectRatio="none", class_="ranks")
    return join(drawn, _numbers(len(values), chosen))


_MOST_NUMBERS: Final = 16


def _numbers(count: int, chosen: int | None) -> Html:
    """Return the numbers of bars below them: of each, or of every n-th at its left edge."""
    apart = next((each for each in range(1, count + 1) if count % each == 0 and count // each <= _MOST_NUMBERS), 1)
    numbers = [
        tag("span", f"{number}", class_="chosen" if number == chosen else None) for number in range(0, count, apart)
    ]
    return tag("div", *numbers, class_="numbers-below" if apart == 1 else "numbers-below apart", aria_hidden="true")


def share(value: float, wanted: float | None = None, label: str = "") -> Html:
    """Return a bar of a share between 0 and 1, with a mark where it is wanted to be."""
    parts = [
        tag("rect", x=0, y=0, width=200, height=10, class_="track"),
        tag("rect", x=0, y=0, width=f"{min(max(value, 0), 1) * 200:.1f}", height=10, class_="bar"),
    ]
    if wanted is not None:
        parts.append(tag("rect", x=f"{min(max(wanted, 0), 1) * 198:.1f}", y=-1, width=2, height=12, class_="wanted"))
    return svg(200, 10, *parts, label=label or f"{value:.1%}", preserveAspectRatio="none", class_="share")


def meter(name: str, rows: Sequence[tuple[str, float, str]], best: str, most: float | None = None) -> Html:
    """Return bars of one quantity side by side: what is compared, its value, and the value in words.

    A whole bar is `most`; without it the largest of the values.
    """
    most = most or max((value for _, value, _ in rows), default=0.0) or 1.0
    lines = [
        tag(
            "div",
            tag("span", title, class_="who"),
            svg(
                400,
                16,
                tag("rect", x=0, y=0, width=400, height=16, rx=3, class_="track"),
                tag("rect", x=0, y=0, width=f"{value / most * 400:.1f}", height=16, rx=3, class_=f"bar side{number}"),
                label=f"{name}, {title}: {text}",
                preserveAspectRatio="none",
            ),
            tag("b", text),
            class_="meter",
        )
        for number, (title, value, text) in enumerate(rows)
    ]
    return tag("section", tag("h3", name), tag("p", best, class_="soft"), join(lines), class_="plot")
