"""The package from outside: what it exports, what importing it costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vlm_stream


def test_public_names_are_sorted_and_all_resolve():
    assert sorted(vlm_stream.__all__) == vlm_stream.__all__
    assert all(getattr(vlm_stream, name) is not None for name in vlm_stream.__all__)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, vlm_stream, vlm_stream.cli, vlm_stream.testing; print(*sys.modules)"
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
    "convert/in_place.py",
    "dispatch/processes.py",
    "dispatch/worker.py",
    "storage/credentials.py",
    "world.py",
}
"""How users tune memory; where their cache is; what is passed on to workers; credentials of stores; the
rank that a launcher gives."""


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_rooms_import_each_other_through_their_doors():
    past = []
    for name, tree in modules():
        own = name.split("/")[0]
        if name == "testing/demo.py":  # plays the command line
            continue
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


def test_files_are_short_enough_to_be_read():
    assert [name for name, _ in modules() if len((PACKAGE / name).read_text().splitlines()) > 400] == []
