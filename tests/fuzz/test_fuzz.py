"""Some inputs of each fuzzer, the same every time; `python -m tests.fuzz --seconds N` goes on from there."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.__main__ import run
from tests.fuzz.targets import TARGETS

EXAMPLES = {
    "state": 40,
    "manifest": 150,
    "index": 60,
    "tar": 60,
    "sample JSON": 150,
    "media headers": 60,
    "Energon notes": 100,
    "LeRobot notes": 60,
    "video headers": 40,
    "clip tables": 300,
}


@pytest.mark.parametrize("name", TARGETS)
def test_only_errors_of_ours_come_of_what_is_read(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=EXAMPLES[name], derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(target.inputs())
    def check(value: object) -> None:
        target.check(value)

    check()


def test_findings_are_counted_and_shown() -> None:
    def fail(value: object) -> None:
        if isinstance(value, bytes) and len(value) > 2:
            raise TypeError("found")

    report = run("sample JSON", seconds=3.0, check=fail)
    assert report.executions > 0
    assert report.findings
    assert "TypeError: found" in report.findings[0]
