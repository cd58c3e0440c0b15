"""HTML as values: what is not `Html` is text and is escaped, so no page can forget to.

Enters: names, attributes, children. Leaves: `Html`. Text of datasets is hostile; this file is the only one of the room
that writes angle brackets.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import quote, urlencode

if TYPE_CHECKING:
    from collections.abc import Iterable

_VOID: Final = frozenset(("br", "circle", "img", "input", "line", "link", "meta", "rect", "source", "use"))
_CONTROL: Final = {number: "\ufffd" for number in range(32) if chr(number) not in "\t\n\r"}
"""What HTML does not allow, also escaped."""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child: TypeAlias = "Html | str | int | float | Iterable[Child] | None"


def _escaped(child: Child) -> str:
    if child is None or child is False:
        return ""
    if isinstance(child, Html):
        return str(child)
    if isinstance(child, str | int | float):
        return escape(str(child).translate(_CONTROL).encode("utf-8", "backslashreplace").decode(), quote=True)
    return "".join(_escaped(each) for each in child)


def join(*children: Child) -> Html:
    """Return children one after the other."""
    return Html(_escaped(children))


def tag(name: str, /, *children: Child, **attributes: Any) -> Html:
    """Return an element; `class_` and `for_` lose their underscore, others become dashes; None and False are left out.

    >>> tag("a", "<b>", href="/?x=1&y=2", class_="key", hidden=True, id=None)
    '<a href="/?x=1&amp;y=2" class="key" hidden>&lt;b&gt;</a>'
    """
    parts = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelled = key.rstrip("_").replace("_", "-")
        parts.append(f" {spelled}" if value is True else f' {spelled}="{_escaped(str(value))}"')
    opened = f"<{name}{''.join(parts)}"
    if name in _VOID:
        return Html(f"{opened}/>")
    return Html(f"{opened}>{_escaped(children)}</{name}>")


def svg(width: float, height: float, *children: Child, label: str, **attributes: Any) -> Html:
    """Return a drawing with a name for those who do not see it."""
    return tag("svg", *children, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label, **attributes)


def link(text: Child, href: str | None) -> Html:
    """Return a link, or the text alone where there is nowhere to go."""
    return tag("span", text) if href is None else tag("a", text, href=href)


def url(path: str, **query: Any) -> str:
    """Return a path with a query; values that are None or empty are left out.

    >>> url("/step", step=3, key=None, source="a/b&c")
    '/step?step=3&source=a/b%26c'
    """
    given = {key: value for key, value in query.items() if value is not None and value != ""}
    return f"{path}?{urlencode(given, quote_via=quote, safe='/')}" if given else path


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], **attributes: Any) -> Html:
    """Return a table that scrolls by itself where the window is narrow."""
    names = list(head)
    return tag(
        "div",
        tag(
            "table",
            tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in names))) if any(names) else None,
            tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)),
        ),
        class_="scroll",
        **attributes,
    )
