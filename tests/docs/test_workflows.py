"""What builds the site elsewhere installs what the site imports."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.scripts import generated
from tests.docs.blocks import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTS = """
import importlib, importlib.machinery, importlib.metadata, json, re, sys

modules, packages, wanted = json.load(sys.stdin)
# What an environment imports at its start, such as a shim of torchvision, may stand here already.
for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
    del sys.modules[name]

find, named = importlib.machinery.PathFinder.find_spec, importlib.metadata.Distribution.from_name

def find_shown(name, *more):
    return None if name.partition(".")[0] in modules else find(name, *more)

def named_if_shown(name):
    if re.sub("[-_.]+", "-", name).lower() in packages:
        raise importlib.metadata.PackageNotFoundError(name)
    return named(name)

importlib.machinery.PathFinder.find_spec = staticmethod(find_shown)
importlib.metadata.Distribution.from_name = staticmethod(named_if_shown)
for name in wanted:
    importlib.import_module(name)
"""


def extras_of(file: str) -> list[str]:
    """Return the extras that a file of a builder of sites installs."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file == ".readthedocs.yaml":
        return list(yaml.safe_load(text)["python"]["install"][0]["extra_requirements"])
    (named,) = re.findall(r"pip install .*'\.\[(.+?)\]'", text)
    return named.split(",")


def brought_by(extras: list[str]) -> set[str]:
    """Return the distributions that are installed with this one and some extras, through all that they require."""
    optional = PROJECT["optional-dependencies"]
    named = [*PROJECT["dependencies"], *(text for each in extras for text in optional[each])]
    waiting = [Requirement(text) for text in named]
    found: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in found:
            continue
        found.add(key)
        try:
            further = importlib.metadata.requires(wanted.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        given = (*wanted.extras, "")
        waiting += [
            each
            for each in map(Requirement, further)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in given)
        ]
    return {name for name, _ in found}


def import_doors(extras: list[str]) -> subprocess.CompletedProcess[str]:
    """Import every door in a process that sees neither modules nor packages beyond some extras."""
    brought = brought_by(extras) | {"vlm-stream"}
    found = importlib.metadata.packages_distributions()
    modules = [name for name, by in found.items() if not brought & {canonicalize_name(each) for each in by}]
    packages = {canonicalize_name(each) for by in found.values() for each in by} - brought
    given = json.dumps([modules, sorted(packages), generated.PUBLIC])
    command = [sys.executable, "-c", IMPORTS]
    return subprocess.run(command, input=given, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("file", [".github/workflows/docs.yml", ".readthedocs.yaml"])
def test_every_door_of_the_api_is_imported_with_what_is_installed(file: str) -> None:
    done = import_doors(extras_of(file))
    assert done.returncode == 0, done.stderr


def test_a_door_whose_extra_is_not_installed_is_noticed() -> None:
    done = import_doors(["docs", "view"])
    assert done.returncode != 0
    assert "No module named 'trl'" in done.stderr or "pip install 'vlm-stream[trainers]'" in done.stderr, done.stderr
