"""The site: built strictly, complete, and without anything from the network."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import zlib
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from docs.scripts import generated, plan_picture
from tests.docs.blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_no_page_asks_the_network_for_anything(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 35
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"', text)
        loaded += re.findall(r'<link(?=[^>]*rel="(?:stylesheet|preload|preconnect|icon)")[^>]*href="([^"]+)"', text)
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\((['\"]?)https?:", style.read_text(encoding="utf-8")), style


def test_every_public_name_is_documented(site: Path) -> None:
    data = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split()[0] for line in zlib.decompress(data).decode().splitlines()}
    for module in generated.PUBLIC:
        for name in generated.public_names(module):
            assert f"{module}.{name}" in known, f"{module}.{name} is not on the page of the API"


def test_every_public_name_has_a_docstring(site: Path) -> None:
    """Constants have theirs under them, as mkdocstrings shows it; an empty entry says nothing."""
    empty = []
    for module in generated.PUBLIC:
        text = (site / "api" / f"{module}.html").read_text(encoding="utf-8")
        for name in generated.public_names(module):
            part = text.partition(f'id="{module}.{name}"')[2][:20000]
            body = part.partition('<div class="doc doc-object')[0]
            if "<p>" not in body:
                empty.append(f"{module}.{name}")
    assert empty == []


def test_every_public_member_has_a_docstring() -> None:
    empty = []
    for module in generated.PUBLIC:
        for name in generated.public_names(module):
            cls = getattr(import_module(module), name)
            if not inspect.isclass(cls) or not cls.__module__.startswith("vlm_stream"):
                continue
            for member, value in vars(cls).items():
                is_code = callable(value) or isinstance(value, property | classmethod | staticmethod | cached_property)
                if is_code and not member.startswith("_") and not inspect.getdoc(getattr(cls, member)):
                    empty.append(f"{module}.{name}.{member}")
    assert empty == []


def test_nothing_generated_is_left_unfilled(site: Path) -> None:
    for name in ("options", "commands", "messages", "api"):
        text = (site / f"{name}.html").read_text(encoding="utf-8")
        assert "<!-- generated:" not in text
    for page in (site / "api").glob("*.html"):
        assert "<!-- generated:" not in page.read_text(encoding="utf-8")
        assert f'href="api/{page.name}"' in text  # from the page of the API
    assert "num_workers" in (site / "options.html").read_text(encoding="utf-8")
    assert "make-shards" in (site / "commands.html").read_text(encoding="utf-8")


def test_the_picture_of_the_plan_is_that_of_the_code() -> None:
    assert plan_picture.draw(plan_picture.plan_step()) == plan_picture.PICTURE.read_text(encoding="utf-8")
