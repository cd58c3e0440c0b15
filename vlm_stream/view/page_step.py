"""The step page: what one rank gets at one step, as strips, beside what all ranks carry."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.view import plots
from vlm_stream.view.catalog import Name
from vlm_stream.view.frame import LiveLinks, document, note, tiles
from vlm_stream.view.html import Html, join, link, table, tag
from vlm_stream.view.plots import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vlm_stream.view.frame import Links
    from vlm_stream.view.rows import Document, Row, StepView
    from vlm_stream.view.steps import Settings

_MODES: Final = ("packed", "grouped", "plain")
_BARRIERS: Final = ("step", "micro", "none")
_MAX_ROWS: Final = 256
_DECODING: Final = "Decoding clips, MP"
_PIXELS: Final = "Pixels of images, MP"
_PAST: Final = (
    "Not of the run, whose state stands at step {:,}: this is a step of a plan from the start with these settings. A "
    "run that had another number of ranks, or other settings, took other steps until then."
)


def step_page(view: StepView, settings: Settings, base: Settings, *, can_build: bool, says: str = "") -> Html:
    """Return the page of a step."""
    links = LiveLinks()
    usual = base.named()
    changed = {name: value for name, value in settings.named().items() if value != usual[name]}

    def at(step: int, rank: int, **more: Any) -> str:
        return links.page("/step", step=step, rank=rank, **changed, **more)

    def button(text: str, rel: str, step: int, rank: int, *, is_there: bool) -> Html:
        if not is_there:
            return tag("span", text, class_="button", aria_disabled="true")
        return tag("a", text, href=at(step, rank), class_="button", data_go=rel)

    last = f" of {view.total:,}" if view.total is not None else ""
    has_next = view.total is None or view.number + 1 < view.total
    pager = tag(
        "div",
        button("← Step", "previous", view.number - 1, view.rank, is_there=view.number > 0),
        tag(
            "span",
            button("↑ Rank", "up", view.number, view.rank - 1, is_there=view.rank > 0),
            " ",
            button("↓ Rank", "down", view.number, view.rank + 1, is_there=view.rank + 1 < settings.world),
        ),
        button("Step →", "next", view.number + 1, view.rank, is_there=has_next),
        class_="pager",
    )
    build = None
    if view.bad is None and can_build:
        build = tag(
            "a",
            "Build it: where tokens stand, what is bad",
            href=at(view.number, view.rank, build=1),
            class_="button",
        )
    return document(
        f"Step {view.number}, rank {view.rank}",
        tag("h1", f"Step {view.number:,}{last}, rank {view.rank} of {settings.world}"),
        note(says) if says else None,
        note(_PAST.format(view.run_begins)) if view.run_begins is not None else None,
        _jump(view, settings),
        pager,
        step_body(view, links, partial(at, view.number), build),
        here="step",
    )


def _jump(view: StepView, settings: Settings) -> Html:
    def field(name: str, value: Any) -> Html:
        return tag("label", name, tag("input", name=name, value=value, type="number", min=0))

    keyed = tag("label", "or key", tag("input", name="key", type="search", placeholder="key or id", data_find=True))
    more = tag("details", tag("summary", "Another plan"), tag("fieldset", *settings_fields(settings)))
    return tag(
        "form",
        field("step", view.number),
        field("rank", view.rank),
        keyed,
        tag("button", "Go", class_="main"),
        more,
        action="/step",
        class_="filters",
    )


def settings_fields(settings: Settings, suffix: str = "") -> list[Html]:
    """Return the inputs that change a plan."""
    found = []
    for name, value in settings.named().items():
        choices = {"mode": _MODES, "barrier": _BARRIERS}.get(name)
        key = f"{name}{suffix}"
        if choices:
            options = [tag("option", each, value=each, selected=each == value) for each in choices]
            found.append(tag("label", name.replace("_", " "), tag("select", *options, name=key)))
        else:
            shown = "" if value is None else value
            least = 0 if name == "seed" else 1
            entry = tag("input", name=key, value=shown, type="number", min=least)
            found.append(tag("label", name.replace("_", " "), entry))
    return found


def step_body(view: StepView, links: Links, at: Any = None, beside: Html | None = None) -> Html:
    """Return what a rank gets: figures, costs over ranks, rows as strips, what was left out."""
    rows = [row for micro in view.micro_batches for row in micro]
    samples = sum(len(row.documents) for row in rows)
    figures = {
        "samples": f"{samples:,}",
        "tokens": f"{sum(row.tokens for row in rows):,}",
        "full": f"{view.fill:.1%}",
        "rows": f"{len(rows):,}",
    }
    if view.llm:  # not a batch of which nothing else is known
        figures["labels in the step"] = "not known" if view.labels is None else f"{view.labels:,}"
        figures["epoch"] = f"{view.epoch}"
    micros = [_micro_batch(view, number, links, at) for number in range(len(view.micro_batches))]
    return join(
        tiles(figures),
        _ranks(view, at),
        tag("div", tag("h2", "Rows"), beside, class_="pager"),
        _legend(view),
        *micros,
        _left_out(view, links),
        _table(rows, links),
    )


def _micro_batch(view: StepView, number: int, links: Links, at: Any) -> Html:
    """Return the rows of one micro-batch, below what ranks, or the parts of a pipeline, wait for in it."""
    rows = view.micro_batches[number]
    strips = [named_row(row, place, links) for place, row in enumerate(rows[:_MAX_ROWS])]
    more = tag("p", f"… and {len(rows) - _MAX_ROWS:,} more rows", class_="soft") if len(rows) > _MAX_ROWS else None
    costs: list[Html] = []
    if view.by_micro and len(view.llm) > 1:
        for name, values in zip(_costs_of(view), view.by_micro[number], strict=True):
            costs.append(_costs(f"{name}, ranks in this micro-batch", values, chosen=view.rank, href=at))
    if rows and rows[0].pipeline is not None:
        llm, vit, decode = ([0.0] * (1 + max(row.pipeline or 0 for row in rows)) for _ in range(3))
        for row in rows:
            llm[row.pipeline or 0] += sum(each.llm for each in row.documents)
            vit[row.pipeline or 0] += sum(each.vit for each in row.documents)
            decode[row.pipeline or 0] += sum(each.decode for each in row.documents)
        for name, own in zip(_costs_of(view), (llm, vit, decode), strict=True):
            costs.append(_costs(f"{name}, the pipeline's micro-batches", own, what="pipeline micro-batch"))
    return tag(
        "div",
        tag("h3", f"Micro-batch {number}") if len(view.micro_batches) > 1 else None,
        tag("div", *costs, class_="costs") if costs else None,
        *strips,
        more,
        class_="panel",
    )


def _costs_of(view: StepView) -> tuple[str, str, str]:
    """Return what the costs are called; the plan balances what decoding clips costs, and a step may have none."""
    return "Language model", "Vision tower", _DECODING if view.is_decode_planned else _PIXELS


def _ranks(view: StepView, at: Any) -> Html | None:
    if len(view.llm) < 2:
        return None
    drawn = [
        tag("div", _costs(name, values, chosen=view.rank, href=at), class_="panel")
        for name, values in zip(_costs_of(view), (view.llm, view.vit, view.decode), strict=True)
    ]
    summed = ", summed over micro-batches; ranks wait at each of them, below" if view.by_micro else ""
    return join(tag("h2", f"Cost over ranks{summed}"), tag("div", *drawn, class_="three"))


def _costs(
    name: str, values: Sequence[float], *, what: str = "rank", chosen: int | None = None, href: Any = None
) -> Html:
    mean = sum(values) / len(values)
    ratio = f"largest / mean {max(values) / mean:.3f}" if mean else "nothing to do"
    drawn = plots.bars(values, f"{name}: {ratio}", what, chosen, href)
    return tag("div", tag("div", tag("b", name), tag("span", ratio), class_="ranks-name"), drawn)


def legend(*, is_built: bool, says: Sequence[str]) -> Html:
    """Return what the colours of strips mean."""
    names = {"text": "text", "vision": "images and videos"}
    if is_built:
        names |= {"label": "learned", "hole": "hole: a bad sample"}
    names |= {"pad": "padding"}
    parts = [tag("span", tag("i", class_=kind), text) for kind, text in names.items()]
    return tag("div", *parts, *(tag("span", each) for each in says), class_="legend")


def _legend(view: StepView) -> Html:
    says = []
    if not all(row.documents for micro in view.micro_batches for row in micro):
        says.append("Empty rows only fill up: they have no labels.")
    if view.bad is None:
        says.append("As planned: vision first in each document. Every document is a link.")
    return legend(is_built=view.bad is not None, says=says)


def named_row(row: Row, place: int, links: Links) -> Html:
    """Return a row as a strip below what it is."""
    says = (
        f"{row.tokens:,} of {row.slots:,} tokens, {len(row.documents)} documents"
        if row.documents
        else "a filler: no labels"
    )
    name = f"row {place}" if row.pipeline is None else f"row {place}, pipeline micro-batch {row.pipeline}"
    return join(tag("div", tag("span", name), tag("span", says), class_="row-name"), _strip(row, links))


def _strip(row: Row, links: Links) -> Html:
    return plots.strip(list(_pieces(row, links)), row.slots, f"{len(row.documents)} documents, {row.tokens} tokens")


def _pieces(row: Row, links: Links) -> Iterator[Piece]:
    if row.runs:
        yield from _built_pieces(row, links)
        return
    for group, each in enumerate(row.documents):
        title, href = _title(each), links.sample(each.name, each.ref.row)
        vision = min(each.vision, each.tokens)
        if vision:
            yield Piece(vision, "vision", title, href, group)
        if each.tokens > vision:
            yield Piece(each.tokens - vision, "text", title, href, group)


def _built_pieces(row: Row, links: Links) -> Iterator[Piece]:
    """Cut what stands in a row where its documents end.

    What comes behind a hole moves up: it is a mark at its place, and its room is at the end of the row.
    """
    runs = deque(row.runs)
    for group, each in enumerate(row.documents):
        title, href = _title(each), links.sample(each.name, each.ref.row)
        left = 0 if each.hole else each.tokens
        if each.hole:
            yield Piece(0, "hole", f"{title}: {each.hole}", href, group)
        while left and runs:
            kind, length = runs.popleft()
            taken = min(left, length)
            yield Piece(taken, kind, title, href, group)
            left -= taken
            if taken < length:
                runs.appendleft((kind, length - taken))
    for group, each in enumerate(row.documents, len(row.documents)):
        if each.hole:
            yield Piece(
                each.tokens,
                "hole",
                f"Room of {_title(each)}: {each.hole}",
                links.sample(each.name, each.ref.row),
                group,
            )


def _title(each: Document) -> str:
    own = f" ({each.id})" if each.id else ""
    return f"{' / '.join(each.name)}{own}: {each.tokens:,} tokens, {each.vision:,} of them vision"


def _left_out(view: StepView, links: Links) -> Html | None:
    rows: list[list[Any]] = [
        [reason, _name(each, links), f"{each.tokens:,}", "left out by the plan here"] for reason, each in view.dropped
    ]
    if view.bad is not None:
        for line in view.bad:
            href = links.sample(Name(line.source, line.shard, line.sample)) if line.shard else None
            rows.append([f"{line.stage}: {line.reason}", link(line.id or line.sample, href), "", line.detail])
        if not rows and view.llm:
            return tag("p", "Built: nothing in it is bad.", class_="good")
    if not rows:
        return None
    return tag("div", tag("h3", "Left out"), table(["reason", "sample", "tokens", "detail"], rows), class_="panel")


def _name(each: Document, links: Links) -> Html:
    return link(each.id or each.name.key, links.sample(each.name, each.ref.row))


def _table(rows: list[Row], links: Links) -> Html:
    lines = [
        [
            str(place),
            _name(each, links),
            each.name.source,
            each.name.shard,
            each.name.key,
            f"{each.tokens:,}",
            f"{each.vision:,}",
        ]
        for place, row in enumerate(rows[:_MAX_ROWS])
        for each in row.documents
    ]
    names = ["row", "sample", "source", "shard", "key", "tokens", "vision"]
    return tag(
        "details",
        tag("summary", f"The {len(lines):,} documents as a table"),
        tag("div", table(names, lines), class_="panel"),
    )
