"""Hooks of mkdocs: what the site derives instead of saying it twice.

- the project's URLs come from pyproject.toml;
- pages that live outside of docs/ (README, changelog, ...) become pages of the site, with their links turned;
- links to files of the repository that are no pages point to where these can be read;
- the API has a page for each module that users import from;
- `<!-- generated: NAME -->` is filled by `generated.py`: options, commands, messages, the API.
"""

from __future__ import annotations

import posixpath
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.scripts import generated
from docs.scripts.links import ROOT, address_of, project_url, replace_links

ELSEWHERE: Final = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "recipes.md": "configs/README.md",
    "benchmarks.md": "benchmarks/RESULTS.md",
}
"""Pages of the site by the files that they are."""
_log = get_plugin_logger("vlm_stream")


def on_config(config: Any) -> Any:
    """Say where the site is, and link to the source."""
    config.site_url = f"{project_url(name='Documentation')}/"
    # Not repo_url: the theme would ask the host of it for figures in every reader's browser.
    config.copyright = f'<a href="{project_url()}">Source</a>'
    for section in config.nav:
        for place, entry in enumerate(section.get("Reference", [])):
            if entry == {"API": "api.md"}:
                section["Reference"][place] = {"API": ["api.md", *generated.api_pages()]}
    config.watch += [str(ROOT / source) for source in ELSEWHERE.values()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that live outside of docs/."""
    for page, source in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for page, text in generated.api_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Fill in what is generated, and turn links."""
    own = page.file.src_uri
    source = ELSEWHERE.get(own, f"docs/{own}")
    pages = {real: name for name, real in ELSEWHERE.items()}

    def turn(to: str) -> str:
        path, hash_sign, anchor = to.partition("#")
        real = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = pages.get(real) or (real.removeprefix("docs/") if real.startswith("docs/") else None)
        if inside is not None and files.get_file_from_path(inside) is not None:
            return posixpath.relpath(inside, posixpath.dirname(own) or ".") + hash_sign + anchor
        if not (ROOT / real).exists():
            _log.warning("%s: the link '%s' leads nowhere", source, to)
        return address_of(real + hash_sign + anchor, project_url())

    return replace_links(generated.fill(markdown), turn)
