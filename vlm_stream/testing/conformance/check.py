"""`check`: three launches of a trainer, seven checks, one row of a table."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.testing.conformance.compare import (
    ConformanceError,
    Expected,
    compare_batches,
    compare_evaluations,
    compare_gradients,
    compare_numbers,
    compare_ranks,
    evaluate,
    first_gradients,
    own_loop,
    state_after,
)
from vlm_stream.testing.conformance.launch import LaunchError, launch
from vlm_stream.testing.conformance.run import Records, Run, make_data

CHECKS: Final = {
    "batches": "batches equal to those of our own loop, on every key and rank",
    "ranks": "ranks disjoint, their union the epoch",
    "resume": "saved, killed with SIGKILL, resumed: nothing lost or repeated",
    "world": "resumed with another number of ranks: nothing lost or repeated",
    "evaluation": "two evaluations see the same batches",
    "length": "length and learning rates right, also after a resume",
    "gradients": "accumulated gradients equal to those of one big batch",
}
"""What is checked."""

_Launch: TypeAlias = Callable[..., Records]
_WORLD: Final = 2
_EVALUATIONS: Final = 2


@dataclass(frozen=True, slots=True)
class Report:
    """What a trainer passed, and what it cannot do."""

    function: str
    results: dict[str, str]
    """For each of `CHECKS`: "yes", or "cannot: " and the reason."""

    def row(self) -> str:
        """Return a row of a Markdown table, in the order of `CHECKS`."""
        return "| " + " | ".join([f"`{self.function}`", *(self.results[name] for name in CHECKS)]) + " |"

    @staticmethod
    def header() -> str:
        """Return the first two lines of that table."""
        return "| trainer | " + " | ".join(CHECKS) + " |\n|" + "---|" * (len(CHECKS) + 1)


@dataclass(slots=True)
class _Findings:
    """Sentences by check; those of checks that the trainer cannot pass are not asked for."""

    cannot: Mapping[str, str]
    problems: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, sentences: list[str], when: str = "") -> None:
        if name not in self.cannot:
            self.problems.setdefault(name, []).extend(f"{when}{sentence}" for sentence in sentences)

    def report(self, function: str) -> Report:
        text = "".join(
            f"\n{name} ({CHECKS[name]}):" + "".join(f"\n  - {sentence}" for sentence in sentences)
            for name, sentences in self.problems.items()
            if sentences
        )
        if text:
            raise ConformanceError(f"{function} does not conform:{text}")
        return Report(function, {n: f"cannot: {self.cannot[n]}" if n in self.cannot else "yes" for n in CHECKS})


def check(
    function: str,
    folder: str | Path,
    *,
    cannot: Mapping[str, str] | None = None,
    data: str | Path | None = None,
    save_after: int = 2,
    own_launcher: bool = False,
    timeout_s: float = 300.0,
    **options: Any,
) -> Report:
    """Check a trainer: (1) batches, (2) ranks, (3) resume, (4) world, (5) evaluation, (6) length, (7) gradients.

    It is launched three times: on two ranks, saved and killed; resumed on two ranks to the end, with two evaluations;
    resumed on one rank.

    Args:
        function: The trainer, "package.module:function"; called with a `Run` in every process.
        folder: An empty or new folder for checkpoints and records.
        cannot: What the trainer has no way to do, by name of `CHECKS`, with the reason: it is reported, not checked.
        data: Where `make_data` wrote, to do so once for several checks; by default inside `folder`.
        save_after: Optimizer steps before the save. Processes die in the middle of the step after the next.
        own_launcher: The trainer starts its ranks itself (`run.world` of them).
        timeout_s: For each launch.
        options: Further arguments of every `StreamLoader`.

    Raises:
        ConformanceError: With a sentence for each difference: rank, step, key.
        LaunchError: A process failed; with the end of its output.

    Example:
        >>> print(check("my_trainer:train", tmp_path, cannot={"world": "its checkpoints are per rank"}).row())
        ... # doctest: +SKIP
    """
    cannot = _check_names(cannot or {})
    folder = Path(folder)
    run = Run(
        data=make_data(data or folder / "data"),
        folder=folder / "checkpoints",
        records=folder / "records",
        save_after=None if "resume" in cannot else save_after,
        options=dict(options),
    )
    want = own_loop(run, _WORLD)
    saved = save_after * run.accumulation
    if len(want[0]) < saved + 2 * run.accumulation:
        raise ConfigError(
            f"the epoch has {len(want[0])} batches for each rank, too few to save after {saved} of them and go on; "
            f"choose a smaller save_after"
        )
    findings = _Findings(cannot)
    start = partial(launch, function, own_launcher=own_launcher, timeout_s=timeout_s)
    if "resume" in cannot:
        _check_whole(findings, run, want, start)
    else:
        _check_resumes(findings, run, want, start)
    return findings.report(function)


def _check_whole(findings: _Findings, run: Run, want: Expected, start: _Launch) -> None:
    """Train from the start to the end."""
    whole = start(replace(run, evaluations=_EVALUATIONS, records=run.records / "whole"), world=_WORLD)
    _check_start(findings, run, whole, want, whole=True)
    _check_end(findings, run, whole.train, whole, want)


def _check_resumes(findings: _Findings, run: Run, want: Expected, start: _Launch) -> None:
    """Kill a run after its save; resume it on as many ranks, and on one."""
    save_after = run.save_after or 0
    saved = save_after * run.accumulation
    begin = replace(run, kill_after=saved + run.accumulation + 1, records=run.records / "killed")
    killed = start(begin, world=_WORLD)
    _check_start(findings, run, killed, want, whole=False)
    resumed = _resume(start, run, _WORLD, "resumed")
    findings.add("resume", compare_batches(resumed.train, want, first=saved, whole=True), "resumed: ")
    both = {rank: killed.train.get(rank, [])[:saved] + resumed.train.get(rank, []) for rank in range(_WORLD)}
    _check_end(findings, run, both, resumed, want, done=save_after)
    if "world" not in findings.cannot:
        other = own_loop(run, 1, state_after(run, _WORLD, saved))
        alone = _resume(start, run, 1, "alone")
        findings.add("world", compare_batches(alone.train, other, whole=True), "resumed on 1 rank: ")


def _check_start(findings: _Findings, run: Run, got: Records, want: Expected, *, whole: bool) -> None:
    findings.add("batches", compare_batches(got.train, want, whole=whole))
    if got.worlds != {_WORLD} or set(got.train) != set(range(_WORLD)):
        ranks = (
            f"ranks {sorted(got.train)} of worlds {sorted(got.worlds)} trained, expected {_WORLD} ranks of one world"
        )
        findings.add("ranks", [ranks])
    findings.add("gradients", compare_gradients(got.gradients, first_gradients(run, want)))
    num_steps = None if whole else (run.save_after or 0) + 1
    findings.add("length", _compare_numbers(run, got, want, slice(num_steps), whole=whole))


def _check_end(
    findings: _Findings, run: Run, all_train: dict[int, Any], got: Records, want: Expected, done: int = 0
) -> None:
    samples = {name for rank in want for given in rank for name in given.samples}
    findings.add("ranks", compare_ranks(all_train, want, samples))
    findings.add("evaluation", compare_evaluations(got.evaluated, evaluate(run, _WORLD), _EVALUATIONS))
    if done:
        findings.add("length", _compare_numbers(run, got, want, slice(done, None), whole=True), "resumed: ")


def _compare_numbers(run: Run, got: Records, want: Expected, part: slice, *, whole: bool) -> list[str]:
    length = len(want[0])
    steps = -(-length // run.accumulation)
    schedule = [run.learning_rate * (1 - step / steps) for step in range(steps)]
    expected = {"length": length, "total_steps": steps}
    return compare_numbers(got.told, got.rates, expected=expected, schedule=schedule[part], whole=whole)


def _resume(start: _Launch, run: Run, world: int, name: str) -> Records:
    """Resume from a copy of the checkpoints, so that each resume finds what the killed run left."""
    copy = run.folder.with_name(f"checkpoints-{name}")
    shutil.copytree(run.folder, copy, symlinks=True)
    again = replace(
        run,
        folder=copy,
        records=run.records / name,
        resume=True,
        save_after=None,
        evaluations=_EVALUATIONS if world == _WORLD else 0,
    )
    try:
        return start(again, world=world)
    except LaunchError as error:
        error.add_note(f"resumed from a copy of what the killed run left in {copy}")
        raise


def _check_names(cannot: Mapping[str, str]) -> Mapping[str, str]:
    for name, reason in cannot.items():
        if name not in CHECKS:
            raise ConfigError(
                f"there is no check {name!r} that a trainer could be unable to pass; {nearest_name(name, CHECKS)}"
            )
        if not reason:
            raise ConfigError(f"cannot[{name!r}] has no reason, so nobody would know why it was left out; give one")
    return cannot
