"""What the table of attempts names exists; the lock file holds names and versions alone."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT


def test_every_test_of_the_table_exists() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 60
    for file, name in named:
        path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / file
        assert path.is_file(), file
        assert f"def {name}" in path.read_text(encoding="utf-8"), f"{file}::{name}"


def test_every_attempt_has_a_row() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    cells = {cell.strip() for row in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE) for cell in row.split(",")}
    wanted = [f"R{n}" for n in range(1, 17)] + [f"S{n}" for n in range(1, 8)] + [str(n) for n in range(1, 24)]
    assert [each for each in wanted if each not in cells] == []


def test_the_lock_file_names_versions_alone() -> None:
    lines = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 100
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)] == []
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert {line for line in constraints if "==" in line} <= set(pins)
