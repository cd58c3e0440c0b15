"""Parts of pages that are made of the code: what stands behind `<!-- generated: NAME ARGUMENTS -->`.

Options, commands and messages are kept in the pages, up to `<!-- generated: end -->`, so that they can be read where no
site is built; `python -m docs.scripts.generated` writes them anew. The API is filled in when the site is built.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import inspect
import itertools
import re
from collections import defaultdict
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from docs.scripts import code
from docs.scripts.links import ROOT

_END: Final = "<!-- generated: end -->"
_PART: Final = re.compile(rf"(<!-- generated: (\w+) ?([^>\n]*) -->)(\n.*?\n{_END})?", re.DOTALL)
KEPT: Final = ("options.md", "commands.md", "messages.md")
"""Pages of which the generated parts are kept."""

PUBLIC: Final = (
    "vlm_stream",
    "vlm_stream.errors",
    "vlm_stream.wds",
    "vlm_stream.collate",
    "vlm_stream.encode",
    "vlm_stream.mapstyle",
    "vlm_stream.pp_media",
    "vlm_stream.sources",
    "vlm_stream.view",
    "vlm_stream.integrations.torch",
    "vlm_stream.integrations.transformers",
    "vlm_stream.integrations.trl",
    "vlm_stream.integrations.accelerate",
    "vlm_stream.integrations.lightning",
    "vlm_stream.integrations.automodel",
    "vlm_stream.testing",
    "vlm_stream.testing.conformance",
)
"""Modules that users import from."""


def fill(markdown: str) -> str:
    """Return a page with its generated parts instead of their marks, for the site."""
    return _PART.sub(_made, markdown)


def renew(markdown: str) -> str:
    """Return a page with its generated parts between their marks, as it is kept."""
    return _PART.sub(lambda match: f"{match[1]}\n\n{_made(match).strip()}\n\n{_END}", markdown)


def _made(match: re.Match[str]) -> str:
    makers = {"options": options, "commands": commands, "messages": messages, "api": api, "doors": doors}
    return makers[match[2]](*match[3].split())


def public_names(module: str) -> list[str]:
    """Return the names that a door gives, sorted: its `__all__`, else what it imports from its own rooms."""
    door = import_module(module)
    listed = getattr(door, "__all__", None)
    if listed is not None:
        return sorted(name for name in listed if not name.startswith("_"))
    return sorted(
        name
        for name, value in vars(door).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "vlm_stream").startswith("vlm_stream")
    )


def options(name: str) -> str:
    """Return the table of an options class."""
    from vlm_stream import loader_options, options
    from vlm_stream.media import limits
    from vlm_stream.storage import options as storage

    cls = next(getattr(each, name) for each in (options, loader_options, limits, storage) if hasattr(each, name))
    documents = _attribute_docs(cls)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else _show(field.default)
        meaning = " ".join(filter(None, (field.metadata.get("help"), documents.get(field.name))))
        flag = f" Flag `--{field.name.replace('_', '-')}`." if field.metadata.get("flag") else ""
        choices = _choices(str(field.type))
        rows.append(f"| `{field.name}` | `{default}` | {_cell(meaning)}{choices}{flag} |")
    return "\n".join(rows)


def _show(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return f"{value:,}".replace(",", "_") if isinstance(value, int) and value >= 10_000 else repr(value)


def _choices(kind: str) -> str:
    found = re.search(r"Literal\[(.*?)\]", kind)
    return f" One of {', '.join(f'`{each.strip()}`' for each in found[1].split(','))}." if found else ""


def _attribute_docs(cls: type) -> dict[str, str]:
    """Return the texts that stand under the fields of a class."""
    import ast
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace("{", "&#123;")


def _plain(text: str) -> str:
    """Return a text in which markdown sees no marks."""
    return "".join(f"&#{ord(letter)};" if letter in "*_`[]" else letter for letter in _cell(text))


def commands() -> str:
    """Return the help of every command."""
    from vlm_stream.cli import COMMANDS

    parts = []
    for name, sentence in COMMANDS.items():
        module = import_module(f"vlm_stream.commands.{name.replace('-', '_')}")
        parser = argparse.ArgumentParser(
            prog=f"vlm-stream {name}",
            description=module.__doc__,
            epilog=module.EXAMPLES.replace("\n  ", "\n  vlm-stream "),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=98),
        )
        module.add_arguments(parser)
        parts.append(f"## {name}\n\n{sentence}\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(parts)


def messages() -> str:
    """Return the sentences of all errors of this package, by kind."""
    kinds: dict[str, dict[str, None]] = defaultdict(dict)
    for message in code.messages():
        if message.text:
            line = f"- {_plain(message.text)} [{_plain(message.file)}](../vlm_stream/{message.file})"
            kinds[message.kind][line] = None
    return "\n\n".join("\n".join([f"## {kind}", "", *kinds[kind]]) for kind in sorted(kinds))


def doors() -> str:
    """Return a link to the page of every module that users import from, with what its docstring says first."""
    lines = ["| module | what it is |", "|---|---|"]
    for module in PUBLIC:
        said = (inspect.getdoc(import_module(module)) or "").partition("\n")[0]
        lines.append(f"| [{_plain(module)}](api/{module}.md) | {_cell(said)} |")
    return "\n".join(lines)


def api_pages() -> dict[str, str]:
    """Return a page for each of these modules, by its place in docs/."""
    return {f"api/{module}.md": f"# {module}\n\n<!-- generated: api {module} -->\n" for module in PUBLIC}


def api(module: str) -> str:
    """Return a block of mkdocstrings for every public name of a module.

    What a function made (`make_x = _factory(...)`) has no docstring in the source, and is given its own here.
    """
    parts = []
    for name in public_names(module):
        parts.append(f"::: {module}.{name}")
        value = getattr(import_module(module), name)
        home = getattr(value, "__module__", None)
        if (inspect.isclass(value) or inspect.isfunction(value)) and home and not _is_written(home, name):
            parts.append(inspect.getdoc(value) or "")
    return "\n\n".join(parts)


def _is_written(module: str, name: str) -> bool:
    """Tell whether a module has a `def` or `class` of that name."""
    source = inspect.getsource(import_module(module))
    return re.search(rf"^\s*(def|class) {name}\b", source, re.MULTILINE) is not None


if __name__ == "__main__":
    for kept in KEPT:
        page = ROOT / "docs" / kept
        page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
