"""Which page answers which path, and what of a URL it reads; nothing here knows HTTP.

Enters: a `Viewer` and the values of a query. Leaves: pages, or JPEG bytes. A value that cannot be read is an
`InputError` with a sentence.
"""

from __future__ import annotations

import io
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vlm_stream.conversation import iter_media, named_span
from vlm_stream.errors import BadSampleError, InputError
from vlm_stream.format import medium_of
from vlm_stream.view.catalog import Name
from vlm_stream.view.facts import KINDS, Query
from vlm_stream.view.frame import LiveLinks, document
from vlm_stream.view.html import Html, tag
from vlm_stream.view.page_compare import compare, compare_page
from vlm_stream.view.page_dataset import dataset_page, overview_part
from vlm_stream.view.page_run import run_page, run_part
from vlm_stream.view.page_sample import sample_body
from vlm_stream.view.page_step import step_page
from vlm_stream.view.pictures import first_medium, load_decoders, thumbnail, to_jpeg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vlm_stream.plan import Ref
    from vlm_stream.view.viewer import Viewer

_COMPARED_STEPS: Final = 50
_MOST_STEPS: Final = 20_000
_MAX_THUMB_BYTES: Final = 32 << 20
"""Larger clips are not fetched for a thumbnail."""


class Moved(NamedTuple):
    """The answer is another page."""

    to: str


class Waiting(NamedTuple):
    """The answer is still made: ask again."""

    title: str


def _soon(title: str, make: Callable[[Viewer, Mapping[str, str]], Html | Moved]) -> Any:
    """Return a page that is waited for only so long; one that says so stands in for it meanwhile."""

    def page(viewer: Viewer, values: Mapping[str, str]) -> Html | Moved | Waiting:
        given = dict(values)
        found = viewer.soon((title, tuple(sorted(given.items()))), lambda: make(viewer, given))
        return Waiting(title) if found is None else found

    return page


def _number(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 18:
        raise InputError(f"{name}={text!r:.60} is not a whole number; write one, or leave it out")
    return int(text)


def _query(viewer: Viewer, values: Mapping[str, str]) -> Query:
    kind, source = values.get("kind", ""), values.get("source", "")
    if kind and kind != "text" and kind not in KINDS:
        raise InputError(f"kind={kind!r:.60} is none of text, {', '.join(KINDS)}; choose one of them")
    if source and source not in viewer.catalog.source_names:
        raise InputError(f"there is no source {source!r:.200} here; there are {', '.join(viewer.catalog.source_names)}")
    return Query(
        source=source,
        entry=values.get("entry", ""),
        kind=kind,
        tokens_from=_number(values, "tokens_from"),
        tokens_to=_number(values, "tokens_to"),
        text=values.get("text", ""),
    )


def ref_of(viewer: Viewer, values: Mapping[str, str]) -> Ref:
    """Return the sample that a URL names."""
    name = Name(values.get("source", ""), values.get("shard", ""), values.get("key", ""))
    return viewer.catalog.find(name, _number(values, "row"))


def _home(_viewer: Viewer, _values: Mapping[str, str]) -> Moved:
    return Moved("/dataset")


def _dataset(viewer: Viewer, values: Mapping[str, str]) -> Html:
    viewer.catalog.start_scan()
    at = max((_number(values, "place") or 1) - 1, 0) or _number(values, "at") or 0
    return dataset_page(viewer.overview, _query(viewer, values), at, backwards=bool(values.get("back")))


def _overview(viewer: Viewer, values: Mapping[str, str]) -> Html:
    return overview_part(viewer.overview, _query(viewer, values))


def _sample(viewer: Viewer, values: Mapping[str, str]) -> Html:
    sample = viewer.samples.read(ref_of(viewer, values))
    catalog, links = viewer.catalog, LiveLinks()

    def neighbour(text: str, rel: str, place: int) -> Html:
        if not 0 <= place < catalog.num_samples:
            return tag("span", text, class_="button", aria_disabled="true")
        ref = catalog.ref_at(place)
        (drawn,) = catalog.draw([ref])
        href = links.sample(catalog.name_of(ref, drawn), ref.row)
        return tag("a", text, href=href, class_="button", data_go=rel)

    beside = tag(
        "div",
        neighbour("← Previous", "previous", sample.place - 1),
        tag("span", f"sample {sample.place + 1:,} of {catalog.num_samples:,}", class_="soft"),
        neighbour("Next →", "next", sample.place + 1),
        class_="pager",
    )
    return document(sample.id or sample.name.key, sample_body(sample, links, beside), here="sample")


def _find(viewer: Viewer, values: Mapping[str, str]) -> Moved:
    ref = viewer.catalog.datasets.find(values.get("key", ""))[0]
    (drawn,) = viewer.catalog.draw([ref])
    return Moved(LiveLinks().sample(viewer.catalog.name_of(ref, drawn), ref.row))


def _step(viewer: Viewer, values: Mapping[str, str]) -> Html:
    book, says = viewer.book, ""
    settings = book.settings(values)
    position = viewer.position()
    step, rank = _number(values, "step"), _number(values, "rank")
    key = values.get("key", "").strip()
    if key:
        refs = viewer.catalog.datasets.find(key)
        found = book.find(settings, refs)
        if not found:
            why = "it may be too long for a row"
            if position:
                why += ", or came before the state of the run"
            raise InputError(f"the sample '{key}' is not delivered by this plan: {why}")
        step, rank = found[0].step, found[0].rank
        also = f", and {len(found) - 1} more of that name" if len(found) > 1 else ""
        says = f"'{key}' is in row {found[0].row} of micro-batch {found[0].micro}, document {found[0].place}{also}."
    elif rank is not None and rank >= settings.world:
        says = f"There is no rank {rank:,} among {settings.world:,}, which count from 0: this is the last one."
        rank = settings.world - 1
    step = position if step is None else step
    view = book.view(settings, step, rank or 0, is_built=bool(values.get("build")))
    return step_page(view, settings, book.base, can_build=viewer.processor is not None, says=says)


def _run(viewer: Viewer, _values: Mapping[str, str]) -> Html:
    return run_page(viewer.run())


def _run_now(viewer: Viewer, _values: Mapping[str, str]) -> Html:
    view = viewer.run()
    if view is None:
        raise InputError("there is no run to show")
    return run_part(view)


def _compare(viewer: Viewer, values: Mapping[str, str]) -> Html:
    book = viewer.book
    settings = book.settings(values, "_a"), book.settings(values, "_b")
    max_steps = min(max(_number(values, "steps") or _COMPARED_STEPS, 1), _MOST_STEPS)
    found = None
    if not values:  # while somebody fills in the form
        viewer.warm(lambda: compare(book, book.base, max_steps))
    else:
        found = compare(book, settings[0], max_steps), compare(book, settings[1], max_steps)
    return compare_page(settings, found, max_steps)


def first_pages(viewer: Viewer) -> tuple[Callable[[], object], ...]:
    """Return what makes the pages that are asked for first, and so loads and reads what all of them need.

    Plans come last: they read many indexes at a time, for which pages would wait, and find them read by then.
    """

    def sample() -> None:
        ref = viewer.catalog.ref_at(0)
        (drawn,) = viewer.catalog.draw([ref])
        _sample(viewer, viewer.catalog.name_of(ref, drawn)._asdict() | {"row": "0"})

    dataset, step, run = (partial(make, viewer, {}) for make in (_dataset, _step, _run))
    return load_decoders, dataset, sample, lambda: viewer.catalog.start_scan().join(), step, run


def _thumb(viewer: Viewer, values: Mapping[str, str]) -> bytes:
    ref = ref_of(viewer, values)

    def make() -> list[bytes]:
        (drawn,) = viewer.catalog.draw([ref])
        name = first_medium(drawn)
        medium = medium_of(name) if name else None
        size = next((size for own, _, size in drawn.members if own == name), 0)
        if name is None or medium not in ("image", "video") or size > _MAX_THUMB_BYTES:
            raise InputError(f"no thumbnail: {size / 1e6:,.0f} MB" if size else "no picture in it")
        if medium == "image":
            return [thumbnail(viewer.catalog.read_member(drawn, name), medium)]
        (members,) = viewer.catalog.read_texts([drawn], name)
        if isinstance(members, BadSampleError):
            raise members
        items = iter_media(viewer.catalog.conversation(ref, drawn, members))
        seconds = next((named_span(item) for item in items if item.get("video") == name), None)
        return [thumbnail(members[name], medium, seconds)]

    return viewer.kept(("thumb", ref), make)[0]


def _picture(viewer: Viewer, values: Mapping[str, str]) -> bytes:
    ref, number = ref_of(viewer, values), _number(values, "number") or 0
    return viewer.kept(("picture", ref, number), lambda: [viewer.samples.picture(ref, number)])[0]


def _frame(viewer: Viewer, values: Mapping[str, str]) -> bytes:
    ref, number, place = ref_of(viewer, values), _number(values, "number") or 0, _number(values, "place") or 0
    frames = viewer.frames_of(ref, number)
    if not 0 <= place < len(frames):
        raise InputError(f"the clip has no frame at place {place}")
    return frames[place]


def no_picture(why: str) -> bytes:
    """Return a picture that says why there is none."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (288, 216), (120, 60, 64))
    text = "\n".join(textwrap.wrap(why.encode("ascii", "replace").decode(), 40)[:9])
    ImageDraw.Draw(picture).multiline_text((14, 14), f"no picture\n\n{text}", fill=(255, 236, 236), spacing=5)
    return to_jpeg(picture)


def icon() -> bytes:
    """Return the picture of the tab."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    canvas = ImageDraw.Draw(picture)
    for left, top, right, colour in (
        (2, 5, 12, "#4f80cf"),
        (14, 5, 30, "#e58e2c"),
        (2, 18, 19, "#e58e2c"),
        (21, 18, 30, "#4f80cf"),
    ):
        canvas.rounded_rectangle((left, top, right, top + 9), 2, fill=colour)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


PAGES: Final[dict[str, Callable[[Any, Any], Html | Moved | Waiting]]] = {
    "/": _home,
    "/dataset": _dataset,
    "/dataset/overview": _overview,
    "/sample": _sample,
    "/find": _find,
    "/step": _soon("Step", _step),
    "/run": _soon("Run", _run),
    "/run/now": _run_now,
    "/compare": _soon("Compare", _compare),
}
PICTURES: Final[dict[str, Callable[[Any, Any], bytes]]] = {"/thumb": _thumb, "/picture": _picture, "/frame": _frame}
