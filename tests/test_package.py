"""The package from outside: what it exports, what importing it costs."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from inspect import isfunction
from pathlib import Path

import pytest

import vlm_stream


def test_public_names_are_sorted_and_all_resolve():
    assert sorted(vlm_stream.__all__) == vlm_stream.__all__
    assert all(getattr(vlm_stream, name) is not None for name in vlm_stream.__all__)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, vlm_stream, vlm_stream.cli; print(*sys.modules)"
    modules = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not modules & {"torch", "transformers", "numpy", "pyarrow", "obstore", "PIL", "rich", "pydantic"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nothing"):
        vlm_stream.Nothing  # noqa: B018


PACKAGE = Path(vlm_stream.__file__).parent
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
ENVIRONMENT_READERS = {
    "allocator.py",
    "commands/show.py",
    "convert/alone.py",
    "dispatch/processes.py",
    "dispatch/worker.py",
    "storage/credentials.py",
    "world.py",
}
"""How users tune memory; which pictures their terminal shows; where their cache is; what is passed on to workers;
credentials of stores; the rank that a launcher gives."""


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_rooms_import_each_other_through_their_doors():
    past = []
    for name, tree in modules():
        own = name.split("/")[0]
        for node in ast.walk(tree):
            parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            if parts[:1] == ["vlm_stream"] and len(parts) > 2 and parts[1] in ROOMS and parts[1] != own:
                past.append(f"{name}: {node.module}")
    assert past == []


def test_only_few_files_read_the_environment():
    readers = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert {name for name in readers if not name.startswith("testing/")} == ENVIRONMENT_READERS


def test_the_table_of_rooms_is_what_is_enforced():
    root = PACKAGE.parent
    contract = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [set(re.findall(r"vlm_stream\.(\w+)", layer)) for layer in contract["layers"]]
    table = (root / "docs/design.md").read_text().partition("| room | concern |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert [set(re.findall(r"`(\w+)(?:/|\.py)`", row)) for row in rows] == layers
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert set().union(*layers) == ROOMS | modules


def test_files_are_short_enough_to_be_read():
    assert [name for name, _ in modules() if len((PACKAGE / name).read_text().splitlines()) > 400] == []


@pytest.mark.parametrize(
    "room", ["", ".collate", ".mapstyle", ".pixels", ".pp_media", ".testing", ".testing.conformance"]
)
def test_what_users_call_is_described(room: str):
    door = import_module(f"vlm_stream{room}")
    names = getattr(door, "__all__", None) or [name for name in vars(door) if not name.startswith("_")]
    found = {name: getattr(door, name) for name in names}
    called = {
        name: value for name, value in found.items() if callable(value) and value.__module__.startswith("vlm_stream")
    }
    assert called
    methods = {
        f"{name}.{method}": value
        for name, kind in called.items()
        for method, value in vars(kind).items()
        if isinstance(kind, type) and isfunction(value) and not method.startswith("_")
    }
    assert [name for name, value in (called | methods).items() if not value.__doc__] == []
