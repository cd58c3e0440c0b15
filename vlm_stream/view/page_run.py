"""The run page: position, rates, builders, mixture, and the ledger with a link to each bad sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vlm_stream.schema import human_bytes
from vlm_stream.view import plots
from vlm_stream.view.catalog import Name
from vlm_stream.view.frame import LiveLinks, document, note, tiles
from vlm_stream.view.html import Html, join, link, table, tag

if TYPE_CHECKING:
    from vlm_stream.view.runs import RunView

_EVERY_MS: Final = 2000
_RATES: Final = {
    "tokens_per_s": ("tokens a second", ",.0f"),
    "samples_per_s": ("samples a second", ",.1f"),
    "megabytes_per_s": ("MB a second", ",.1f"),
    "wait_s_per_batch": ("ms of waiting a batch", ",.1f"),
    "fetch_s_per_batch": ("ms of fetching a batch", ",.1f"),
    "encode_s_per_batch": ("ms of encoding a batch", ",.1f"),
    "ready_batches": ("batches ready", ",.0f"),
    "fill": ("full", ".1%"),
    "worker_restarts": ("builders replaced", ",.0f"),
    "resident_megabytes": ("MB of memory", ",.0f"),
}
_OWN: Final = (
    "Rates, builders and ledger are those of this rank; position and mixture are those of the run. Other ranks have "
    "ledgers of their own, in the files of their ledger_path, and pages of their own if they call serve_view."
)


def run_page(view: RunView | None) -> Html:
    """Return the page of a run; None: there is no run to show."""
    if view is None:
        return document(
            "Run",
            tag("h1", "No run"),
            note(
                "Start the viewer with --state CHECKPOINT (and --ledger FILE) to see where a run stands, or call "
                "loader.serve_view(port) in the trainer to watch it."
            ),
            here="run",
        )
    title = "Running" if view.is_live else "A saved run"
    return document("Run", tag("h1", title), run_part(view), here="run")


def run_part(view: RunView) -> Html:
    """Return what renews itself while the loader runs."""
    links = LiveLinks()
    of = f" of {view.total:,}" if view.total is not None else ""
    figures = {
        "step": f"{view.step:,}{of}",
        "samples delivered": f"{view.samples:,}",
        "finished rounds": f"{view.rounds:,}",
    }
    if view.batches is not None:
        figures["batches in this round"] = f"{view.batches:,}"
    rates = {
        text: format(view.rates[name] * (1000 if text.startswith("ms ") else 1), spec)
        for name, (text, spec) in _RATES.items()
        if name in view.rates
    }
    progress = plots.share(view.step / view.total, label=f"{view.step / view.total:.1%} done") if view.total else None
    here = links.page("/step", step=max(view.step - 1, 0))
    return tag(
        "div",
        tiles(figures),
        tag("div", progress, class_="progress") if progress else None,
        tag("p", link("The last step that was delivered", here)) if view.step else None,
        _rates(rates),
        _builders(view),
        _mixture(view),
        _ledger(view, links),
        data_renew="/run/now" if view.is_live else None,
        data_every=_EVERY_MS if view.is_live else None,
    )


def _rates(rates: dict[str, str]) -> Html | None:
    if not rates:
        return None
    return join(tag("h2", "Rates"), tag("p", _OWN, class_="soft"), tag("div", tiles(rates), class_="rates"))


def _mixture(view: RunView) -> Html:
    names = ["source", "wanted (the mark)", view.lately, ""]
    rows: list[list[Any]] = [
        [each.name, f"{each.wanted:.2%}", f"{each.recent:.2%}", plots.share(each.recent, each.wanted)]
        for each in view.mixture
    ]
    if any(each.samples for each in view.mixture):  # by whole windows: of the first nothing is drawn yet
        names += ["samples in all windows before", "share of them"]
        rows = [[*row, f"{each.samples:,}", f"{each.drawn:.2%}"] for row, each in zip(rows, view.mixture, strict=True)]
    return tag("div", tag("h3", f"Mixture, by {view.weighed}"), table(names, rows), class_="panel")


def _builders(view: RunView) -> Html | None:
    if not view.builders:
        return None
    names = list(view.builders[0])

    def cell(name: str, value: Any) -> str:
        if name == "bytes":
            return human_bytes(value)
        return f"{value:,.3f}" if isinstance(value, float) else str(value)

    rows = [[cell(*pair) for pair in each.items()] for each in view.builders]
    return tag("div", tag("h3", "Builders"), table([name.replace("_", " ") for name in names], rows), class_="panel")


def _ledger(view: RunView, links: LiveLinks) -> Html:
    if not view.reasons:
        return tag("div", tag("h3", "Ledger"), tag("p", "Nothing was bad.", class_="good"), class_="panel")
    most = max(view.reasons.values())
    reasons = [[reason, f"{count:,}", plots.share(count / most)] for reason, count in view.reasons.items()]
    lines = []
    for line in view.bad:
        href = links.sample(Name(line.source, line.shard, line.sample)) if line.shard else None
        lines.append([link(line.id or line.sample, href), f"{line.stage}: {line.reason}", line.detail, line.shard])
    return join(
        tag("div", tag("h3", "Why samples were bad"), table(["reason", "samples", ""], reasons), class_="panel"),
        tag("div", tag("h3", "The newest"), table(["sample", "reason", "detail", "shard"], lines), class_="panel"),
    )
