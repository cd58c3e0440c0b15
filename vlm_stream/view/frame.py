"""What all pages share: the frame, links, and the style sheet; as pages of a server or as one file.

Enters: the body of a page. Leaves: a document. Pages ask `Links` where things are: a server's links are URLs, those of
a single file are the things themselves (`data:`), or nowhere.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.view.html import Child, Html, join, svg, tag, url

if TYPE_CHECKING:
    from vlm_stream.view.catalog import Name
    from vlm_stream.view.sample import Medium, Sample

PAGES: Final = {"dataset": "Dataset", "step": "Step", "run": "Run", "compare": "Compare"}
_KEYS: Final = (
    ("← →  or  p n", "previous and next: page, sample or step"),
    ("↑ ↓", "another rank of the step"),
    ("j k", "from card to card, Enter opens"),
    ("/", "find"),
    ("t", "the prompt token by token"),
    ("d s r c", "Dataset, Step, Run, Compare"),
)


class Links:
    """Where a page's links lead; None: nowhere, as in a page that stands alone."""

    def page(self, path: str, **query: Any) -> str | None:
        """Return the URL of a page."""

    def sample(self, name: Name, row: int | None = None) -> str | None:
        """Return the URL of a sample's page."""

    def member(self, sample: Sample, member: str) -> str | None:
        """Return the bytes of a member."""

    def picture(self, sample: Sample, medium: Medium) -> str | None:
        """Return an image as the model sees it."""

    def frame(self, sample: Sample, medium: Medium, place: int) -> str | None:
        """Return one of a clip's frames that are shown."""


class LiveLinks(Links):
    """Links of a server."""

    def page(self, path: str, **query: Any) -> str:
        """Return the URL of a page."""
        return url(path, **query)

    def sample(self, name: Name, row: int | None = None) -> str:
        """Return a sample's own link: source, shard and key."""
        return url("/sample", **name._asdict(), row=row)

    def thumb(self, name: Name, row: int) -> str:
        """Return a small picture of a sample."""
        return url("/thumb", **name._asdict(), row=row)

    def member(self, sample: Sample, member: str) -> str:
        """Return the bytes of a member."""
        return url("/member", **sample.name._asdict(), row=sample.ref.row, member=member)

    def picture(self, sample: Sample, medium: Medium) -> str:
        """Return an image as the model sees it."""
        return url("/picture", **sample.name._asdict(), row=sample.ref.row, number=medium.number)

    def frame(self, sample: Sample, medium: Medium, place: int) -> str:
        """Return one of a clip's frames that are shown."""
        return url("/frame", **sample.name._asdict(), row=sample.ref.row, number=medium.number, place=place)


@cache
def static_text(name: str) -> str:
    """Return a file that is shipped with the package."""
    return (files("vlm_stream.view") / "static" / name).read_text(encoding="utf-8")


def document(title: str, *body: Child, here: str = "") -> Html:
    """Return a page of the server."""
    nav = [
        tag("a", name, href=f"/{page}", aria_current="page" if page == here else None, data_go=page)
        for page, name in PAGES.items()
    ]
    find = tag(
        "form",
        tag(
            "input",
            type="search",
            name="key",
            placeholder="key or id",
            aria_label="find a sample by key or id",
            data_find=here not in ("dataset",),
        ),
        tag("button", "Find"),
        action="/find",
    )
    keys = [join(tag("dt", tag("kbd", key)), tag("dd", text)) for key, text in _KEYS]
    return _whole(
        join(
            tag("link", rel="stylesheet", href="/static/view.css"),
            tag("script", src="/static/view.js", defer=True),
        ),
        title,
        tag("a", "to the content", href="#main", class_="skip"),
        tag("header", tag("a", _mark(), "vlm-stream", href="/", class_="brand"), tag("nav", *nav), find, class_="top"),
        tag("main", *body, id="main"),
        tag("footer", "Keys: ", tag("button", "?", data_help=True, aria_label="show the keys"), " shows them."),
        tag("dialog", tag("h3", "Keys"), tag("dl", *keys), tag("form", tag("button", "Close"), method="dialog")),
    )


def file_document(title: str, *body: Child) -> Html:
    """Return a page that is one file: its style is in it, and it may load and run nothing."""
    style = static_text("view.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; media-src data:; style-src 'sha256-{digest}'"
    return _whole(
        join(tag("meta", http_equiv="Content-Security-Policy", content=policy), tag("style", Html(style))),
        title,
        tag("main", *body, id="main"),
    )


def _whole(head: Html, title: str, *body: Child) -> Html:
    return join(
        Html("<!doctype html>"),
        tag(
            "html",
            tag(
                "head",
                tag("meta", charset="utf-8"),
                tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
                tag("meta", name="referrer", content="no-referrer"),
                tag("title", f"{title} · vlm-stream"),
                head,
            ),
            tag("body", *body),
            lang="en",
        ),
        Html("\n"),
    )


def _mark() -> Html:
    blocks = ((0, 8, "bar"), (9, 12, "bar chosen"), (22, 2, "track"), (0, 13, "bar chosen"), (14, 10, "bar"))
    parts = [
        tag("rect", x=left, y=0 if number < 3 else 9, width=width, height=7, rx=1, class_=kind)
        for number, (left, width, kind) in enumerate(blocks)
    ]
    return svg(24, 16, *parts, label="", aria_hidden="true")


def tiles(values: dict[str, str]) -> Html:
    """Return the figures of a page's head."""
    return tag(
        "div",
        *(tag("div", tag("b", value), tag("span", name), class_="tile") for name, value in values.items()),
        class_="tiles",
    )


def note(text: Child, *, bad: bool = False) -> Html:
    """Return a sentence that must be seen."""
    return tag("p", text, class_="note bad" if bad else "note", role="status")


def waiting_page(title: str, here: str) -> Html:
    """Return what is shown while a page is made; the browser asks for it again by itself."""
    told = "Indexes are read and steps are planned. This page comes by itself."
    return document(title, tag("h1", title), note(told), here=here)


def error_page(sentence: str, here: str = "") -> Html:
    """Return what is shown where a page cannot be made."""
    return document("Not possible", tag("h1", "This cannot be shown"), note(sentence, bad=True), here=here)
