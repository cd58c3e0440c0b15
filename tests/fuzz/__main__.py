"""Fuzzers for everything that is read from outside: `python -m tests.fuzz --seconds N [--only NAME ...] [--seed S]`.

Each runs in a process of its own, so that a crash of a library is a finding too. It prints a table of executions and
findings, in Markdown as docs/security.md has it, and ends with exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable

_AT_A_TIME = 200
_MAX_FINDINGS = 20


@dataclass
class Report:
    """What one fuzzer did."""

    executions: int = 0
    findings: list[str] = field(default_factory=list)


def run(name: str, *, seconds: float, first_seed: int = 0, check: Callable[[Any], None] | None = None) -> Report:
    """Draw inputs until the time is over; each error that is none of ours is a finding, with the smallest input."""
    target, report = TARGETS[name], Report()
    end = time.monotonic() + seconds
    draw = random.Random(first_seed)
    last: list[str] = [""]

    def examine(value: Any) -> None:
        if time.monotonic() < end:
            report.executions += 1
            last[0] = repr(value)[:2000]
            (check or target.check)(value)

    while time.monotonic() < end and len(report.findings) < _MAX_FINDINGS:
        loop = settings(
            max_examples=_AT_A_TIME,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )(given(target.inputs())(examine))
        try:
            seed(draw.randrange(1 << 32))(loop)()
        except Exception as error:
            sentence = f"{type(error).__name__}: {str(error)[:300]} for {last[0]}"
            if sentence not in report.findings:
                report.findings.append(sentence)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each fuzzer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--json", action="store_true", help="run one fuzzer in this process and print its report")
    args = parser.parse_args()
    if args.json:
        (name,) = args.only
        print(json.dumps(asdict(run(name, seconds=args.seconds, first_seed=args.seed))))
        return 0
    num_findings = 0
    print("| fuzzer | executions | findings |\n|---|---|---|", flush=True)
    told = []
    for name in args.only:
        command = [sys.executable, "-m", "tests.fuzz", "--json", "--only", name, "--seconds", str(args.seconds)]
        # Libraries write what they read to standard error.
        command += ["--seed", str(args.seed)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            report = Report(0, [f"the process ended with {done.returncode}: {done.stderr[-500:]}"])
        else:
            report = Report(**json.loads(done.stdout.splitlines()[-1]))
        num_findings += len(report.findings)
        print(f"| {name} | {report.executions:,} | {len(report.findings)} |", flush=True)
        told += [f"  {name}: {finding}" for finding in report.findings]
    print(*told, sep="\n")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
