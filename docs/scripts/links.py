"""Links of markdown files that leave their folder, made absolute: one function for the site and for the package index.

The project's URL stands in pyproject.toml alone (`[project.urls]`). hatchling calls `ReadmeHook` when it builds the
package; the site's hooks call `point_outside`.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).resolve().parents[2]
_LINK: Final = re.compile(r"(\]\()([^)\s]+)(\))")


def project_url(root: Path = ROOT, name: str = "Source") -> str:
    """Return the address of the repository, or another one of the project, such as that of its `Documentation`."""
    urls: dict[str, str] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    return urls[name].rstrip("/")


def address_of(path: str, url: str, root: Path = ROOT) -> str:
    """Return where a file or folder of the repository can be read on the web; pictures as they are."""
    name, _, anchor = path.partition("#")
    kind = "tree" if (root / name).is_dir() else "raw" if name.endswith((".jpg", ".png", ".svg")) else "blob"
    return f"{url}/{kind}/main/{name}" + (f"#{anchor}" if anchor else "")


def replace_links(text: str, change: Callable[[str], str]) -> str:
    """Change the targets of links and pictures that are not in code blocks; addresses and anchors stay."""

    def target(match: re.Match[str]) -> str:
        to = match[2]
        return match[0] if re.match(r"[a-z]+:|#", to) else f"{match[1]}{change(to)}{match[3]}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else _LINK.sub(target, part) for number, part in enumerate(parts))


def absolute_readme(root: Path = ROOT) -> str:
    """Return the README with links that work outside of the repository."""
    url = project_url(root)
    text = (root / "README.md").read_text(encoding="utf-8")
    return replace_links(text, lambda to: address_of(posixpath.normpath(to), url, root))


try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # not while the package is built
    pass
else:

    class ReadmeHook(MetadataHookInterface):
        """Gives the package index the README with absolute links."""

        def update(self, metadata: dict[str, Any]) -> None:
            """Set the description."""
            text = absolute_readme(Path(self.root))
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
