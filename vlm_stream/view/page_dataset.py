"""The dataset page: totals, sources and entries, histograms, filters, and a grid of samples."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import BadSampleError
from vlm_stream.schema import human_bytes
from vlm_stream.view import plots
from vlm_stream.view.facts import KINDS
from vlm_stream.view.frame import LiveLinks, document, file_document, note, tiles
from vlm_stream.view.html import Child, Html, join, table, tag
from vlm_stream.view.pictures import first_medium
from vlm_stream.view.sample import snippet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.convert import DatasetStats, Histogram
    from vlm_stream.format import Drawn
    from vlm_stream.plan import Ref
    from vlm_stream.view.catalog import Catalog, Page
    from vlm_stream.view.facts import Overview, Query

PAGE_SIZE: Final = 48
_EVERY_MS: Final = 700
_MAX_PARTS: Final = 60
_MEDIA: Final = {"images": "images", "videos": "videos", "audios": "sounds", "text_only": "text alone"}
_FIGURES: Final = {"tokens": "all tokens", "text_tokens": "text tokens"} | _MEDIA | {"bytes": "bytes"}
_KIND_NAMES: Final = {
    "": "any",
    "text": "text alone",
    "image": "with images",
    "video": "with video",
    "audio": "with sound",
}


def dataset_page(overview: Overview, query: Query, at: int, *, backwards: bool = False) -> Html:
    """Return the page of a dataset, at one place of it."""
    catalog = overview.catalog
    page = catalog.page(query, at, PAGE_SIZE, backwards=backwards)
    return document(
        "Dataset",
        tag("h1", ", ".join(dict.fromkeys(source.url for source in catalog.datasets.sources))),
        None if at or backwards else _head(overview, query),
        tag("h2", "Samples", id="samples"),
        _filters(catalog, query),
        _pager(catalog, query, page),
        _grid(catalog, page) if page.refs else _nothing(page),
        _pager(catalog, query, page) if len(page.refs) > 12 else None,
        here="dataset",
    )


def _head(overview: Overview, query: Query) -> Html:
    catalog = overview.catalog
    counted = {dataset.manifest.tokens.processor or "a guess" for dataset in catalog.datasets.opened}
    says = f"Text counted by {', '.join(sorted(counted))}; media by {catalog.plan.geometry.family}."
    # Those of a filter are looked for once the page stands: they go through all that is known.
    part = overview_part(overview, query) if query.is_empty else _renewed(query, 1, tag("h2", _heading(query)))
    return join(tag("p", says, class_="soft"), part)


def _heading(query: Query) -> str:
    if query.is_empty:
        return "Distributions"
    return f"Distributions of what matches{', but for its text' if query.text else ''}"


def _renewed(query: Query, every_ms: int | None, *body: Child) -> Html:
    return tag("div", *body, data_renew=LiveLinks().page("/dataset/overview", **_given(query)), data_every=every_ms)


def overview_part(overview: Overview, query: Query) -> Html:
    """Return totals and histograms, which renew themselves until all shards were read."""
    catalog = overview.catalog
    catalog.start_scan()
    known, wanted = len(catalog.known_facts()), len(catalog.scanned_shards)
    num_shards = sum(len(dataset.samples_per_shard) for dataset in catalog.datasets.opened)
    is_done = known >= wanted or bool(catalog.scan_problem)
    says = None
    if catalog.scan_problem:
        says = note(
            f"Not all indexes can be read, so figures are of {known:,} shards. {catalog.scan_problem}", bad=True
        )
    elif not is_done:
        says = tag("p", f"Reading indexes: {known:,} of {wanted:,} shards so far.", class_="soft", role="status")
    elif wanted < num_shards:
        says = tag("p", f"Of {wanted:,} shards, taken evenly: the dataset is large.", class_="soft")
    shown = [
        plots.histogram(each, partial(_bin_link, each, query) if each.unit == "tokens" else None)
        for each in overview.histograms(replace(query, text=""))
    ]
    return _renewed(
        query,
        None if is_done else _EVERY_MS,
        says,
        _totals(overview, num_shards) if query.is_empty else None,
        tag("h2", _heading(query)),
        tag("div", *shown, class_="plots"),
    )


def _given(query: Query) -> dict[str, Any]:
    return {key: value for key, value in asdict(query).items() if value not in ("", None)}


def _totals(overview: Overview, num_shards: int) -> Html:
    catalog, parts = overview.catalog, overview.parts()
    sources = [part for part in parts if not part.entry]
    is_exact = all(part.is_exact for part in sources)

    def whole(name: str) -> str:
        return _figure(sum(part.sums.get(name, 0) for part in sources), name, is_exact=is_exact)

    figures = {"samples": f"{catalog.num_samples:,}", "shards": f"{num_shards:,}"}
    figures |= {text: whole(name) for name, text in _FIGURES.items()}
    most = max(sum(part.sums.get("tokens", 0) for part in sources), 1)
    rows = []
    for part in parts[:_MAX_PARTS]:
        name = catalog.source_names[part.source]
        link = tag("a", part.entry or name, href=LiveLinks().page("/dataset", source=name, entry=part.entry))
        share = part.sums.get("tokens", 0) / most
        rows.append(
            [
                *(["", link] if part.entry else [link, ""]),
                f"{part.samples:,}",
                tag("span", plots.share(part.samples / max(catalog.num_samples, 1))),
                _figure(part.sums.get("tokens", 0), "tokens", is_exact=part.is_exact),
                tag("span", plots.share(share)),
                *(_figure(part.sums.get(kind, 0), kind, is_exact=part.is_exact) for kind in _MEDIA),
                _figure(part.sums.get("bytes", 0), "bytes", is_exact=part.is_exact),
                "" if part.entry else part.url,
            ]
        )
    names = ["source", "entry", "samples", "", "tokens", "", *_MEDIA.values(), "bytes", "url"]
    return join(
        tiles(figures), tag("div", tag("h3", "Sources and entries"), table(names, rows), class_="panel sources")
    )


def _figure(value: float, name: str, *, is_exact: bool) -> str:
    if name == "bytes":
        shown = human_bytes(round(value))
    else:
        shown = f"{value:,.0f}" if is_exact else f"{float(f'{value:.3g}'):,.0f}"
    return shown if is_exact else f"≈ {shown}"


def _bin_link(shown: Histogram, query: Query, number: int) -> str:
    low, high = shown.edges[number : number + 2]
    is_last = number + 2 == len(shown.edges)
    to = int(high) if is_last else max(int(high) - 1, int(low))
    given = _given(replace(query, tokens_from=int(low), tokens_to=to))
    return LiveLinks().page("/dataset", **given) + "#samples"


def _filters(catalog: Catalog, query: Query) -> Html:
    entries = sorted({name for dataset in catalog.datasets.opened for name in dataset.manifest.shards.entries})

    def select(name: str, choices: dict[str, str], chosen: str) -> Html:
        options = [tag("option", text, value=value, selected=value == chosen) for value, text in choices.items()]
        return tag("label", name, tag("select", *options, name=name))

    def field(name: str, text: str, value: Any, **more: Any) -> Html:
        return tag("label", text, tag("input", name=name, value="" if value is None else value, **more))

    return tag(
        "form",
        select("source", {"": "all"} | {name: name for name in catalog.source_names}, query.source),
        select("entry", {"": "all"} | {name: name for name in entries}, query.entry),
        select("kind", _KIND_NAMES, query.kind),
        field("tokens_from", "tokens from", query.tokens_from, type="number", min=0),
        field("tokens_to", "to", query.tokens_to, type="number", min=0),
        field("text", "text contains", query.text, type="search", data_find=True),
        tag("button", "Filter", class_="main"),
        tag("a", "Clear", href="/dataset", class_="button") if not query.is_empty else None,
        action="/dataset#samples",
        class_="filters",
        role="search",
    )


def _pager(catalog: Catalog, query: Query, page: Page) -> Html:
    given = _given(query)
    links = LiveLinks()

    def button(text: str, rel: str, place: int | None, **how: Any) -> Html:
        if place is None:
            return tag("span", text, class_="button", aria_disabled="true")
        return tag("a", text, href=links.page("/dataset", **given, at=place, **how), class_="button", data_go=rel)

    count = catalog.count(query)
    says = f"{count:,} samples" if query.is_empty else f"{count:,} samples match" if count is not None else ""
    if page.refs:
        first, last = catalog.place_of(page.refs[0]) + 1, catalog.place_of(page.refs[-1]) + 1
        says = f"{len(page.refs)} shown, from place {first:,} to {last:,} of {catalog.num_samples:,}" + (
            f"; {says}" if says and not query.is_empty else ""
        )
    if page.looked_at:
        says += f"; the text of {page.looked_at:,} samples was read"
    if page.is_cut:
        says += ": there may be more, go on to the next page"
    return tag(
        "div",
        button("← Previous", "previous", page.before, back=1),
        tag("span", says, class_="soft", data_says=True),
        _jump(catalog, given),
        button("Next →", "next", page.after),
        class_="pager",
    )


def _jump(catalog: Catalog, given: dict[str, Any]) -> Html:
    kept = (tag("input", type="hidden", name=name, value=value) for name, value in given.items())
    field = tag("input", name="place", type="number", min=1, max=catalog.num_samples, aria_label="go to place")
    return tag("form", *kept, tag("label", "go to place ", field), action="/dataset#samples", class_="place")


def _nothing(page: Page) -> Html:
    if page.is_cut:
        return note("Nothing was found in the samples that were read so far. “Next” reads on from there.")
    return note("No sample from here on matches. Clear a filter, or go back.")


def _grid(catalog: Catalog, page: Page) -> Html:
    drawn = catalog.draw(page.refs)
    texts = [page.texts[ref] for ref in page.refs] if page.texts else catalog.texts(page.refs, drawn)
    cards = (_card(catalog, *each) for each in zip(page.refs, drawn, texts, strict=True))
    return tag("ul", *(tag("li", card) for card in cards), class_="grid")


def _card(catalog: Catalog, ref: Ref, drawn: Drawn, text: str | BadSampleError) -> Html:
    links, name = LiveLinks(), catalog.name_of(ref, drawn)
    facts = catalog.facts(ref.source, ref.shard)
    sizes = drawn.sizes
    badges = [tag("span", f"{facts.tokens[ref.row]:,} tokens", class_="badge")]
    for kind, found in zip(KINDS, (sizes.images, sizes.videos, sizes.audios), strict=True):
        if found:
            badges.append(tag("span", f"{len(found)} {kind}{'s' if len(found) > 1 else ''}", class_=f"badge {kind}"))
    says = f"cannot be read: {text.reason}" if isinstance(text, BadSampleError) else snippet(text)
    member = first_medium(drawn)
    if member is not None and (sizes.images or sizes.videos):
        picture = tag("img", src=links.thumb(name, ref.row), alt=member, loading="lazy")
        shot = tag("div", picture, class_="shot")
    else:
        words = "♪ sound" if member is not None else snippet(says, 230)
        shot = tag("div", words, class_="shot words")
        says = "" if member is None else says
    return tag(
        "a",
        shot,
        tag(
            "div", tag("b", drawn.id or drawn.key), tag("div", *badges, class_="badges"), tag("p", says), class_="says"
        ),
        href=links.sample(name, ref.row),
        class_="card",
    )


def stats_page(stats: DatasetStats, overview: dict[str, str], entries: Sequence[Sequence[str]]) -> Html:
    """Return the statistics of a dataset as one file."""
    names, *rows = entries
    return file_document(
        stats.url,
        tag("h1", stats.url),
        tag("p", f"digest {stats.digest[:16]}", class_="soft"),
        tag("div", table(["", ""], overview.items()), class_="panel"),
        tag("div", tag("h3", "Entries"), table(names, rows), class_="panel numbers"),
        tag("h2", "Distributions"),
        tag("div", *map(plots.histogram, stats.histograms), class_="plots"),
    )
