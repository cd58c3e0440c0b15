"""Draws faults from a seed, lets each happen to a run, and counts what came of it."""

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from vlm_stream.chaos.checker import Checker, Findings, OrderError
from vlm_stream.chaos.crew import Crew, EndedError, HangError
from vlm_stream.chaos.faults import DATA_KINDS, KILLED, PROCESS_KINDS, Kind, Scene
from vlm_stream.chaos.stage import Stage
from vlm_stream.errors import ConfigError
from vlm_stream.lifetimes import make_folder, remove_folder

_SETTLE: Final = 3
"""Steps without a fault behind each."""
_MAX_BEFORE: Final = 50
"""Steps in which a builder is waited for that something can happen to."""
_MAX_ENDS: Final = 8
_MAX_NOTES: Final = 200
_MAX_DELAY_S: Final = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """How long, and by which seed."""

    minutes: float = 3.0
    seed: int = 0
    max_faults: int | None = None
    """Stop after so many; None: when the time is over."""
    max_world: int = 2
    """Most ranks; each resume draws how many there are."""
    patience_s: float = 120.0
    """A step that takes longer is a hang."""
    only: tuple[str, ...] = ()
    """Kinds of faults whose names begin like this; none: all that fit the recipe."""


@dataclass(slots=True)
class Row:
    """What one kind of fault did."""

    fault: str
    times: int = 0
    survived: int = 0
    """The run went on by itself or, where the fault may end it in the way it did, from its last checkpoint."""
    resumed: int = 0
    """Of these, from its last checkpoint."""
    named: int = 0
    lost: int = 0
    repeated: int = 0
    silent: int = 0
    longest_wait_s: float = 0.0


@dataclass(slots=True)
class Report:
    """The table of a run."""

    seed: int
    rows: list[Row] = field(default_factory=list)
    batches: int = 0
    samples: int = 0
    rounds: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    """Sentences of errors, and what was wrong."""

    @property
    def total(self) -> Row:
        """Return all kinds in one."""
        total = Row("all")
        for name in ("times", "survived", "resumed", "named", "lost", "repeated", "silent"):
            setattr(total, name, sum(getattr(row, name) for row in self.rows))
        total.longest_wait_s = max((row.longest_wait_s for row in self.rows), default=0.0)
        return total

    @property
    def is_good(self) -> bool:
        """Tell whether all faults were survived, and nothing was lost, repeated or silent."""
        total = self.total
        return total.survived == total.times and not (total.lost or total.repeated or total.silent)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self) | {"total": asdict(self.total), "is_good": self.is_good}


def run_chaos(arguments: dict[str, Any], options: ChaosOptions, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Run a recipe under faults and return the table.

    Args:
        arguments: Those of `StreamLoader`, as in a recipe.
        options: How long, and by which seed.
        tell: Is given a line for each fault.

    Raises:
        ConfigError: The recipe has nothing that could be disturbed in this way.
    """
    with ExitStack() as stack:
        folder = make_folder("vlm-stream-chaos-")
        stack.callback(remove_folder, folder)
        stage = stack.enter_context(Stage(arguments, folder))
        checker = Checker(stage.planned)
        stack.callback(checker.close)
        draw = random.Random(f"{options.seed}/compare")
        crew = stack.enter_context(Crew(stage, checker, draw, patience_s=options.patience_s))
        return _Run(stage, crew, options, tell).run()


class _Run:
    def __init__(self, stage: Stage, crew: Crew, options: ChaosOptions, tell: Callable[[str], None]) -> None:
        self._stage, self._crew, self._options, self._tell = stage, crew, options, tell
        self._kinds = _kinds_for(stage, options.only)
        self._rows = {kind.name: Row(kind.name) for kind in self._kinds}
        self._report = Report(options.seed)
        self._stepped_at = 0.0
        self._late: set[str] = set()
        """Errors by which faults since the last start may end a run: builders work ahead, so they come later."""

    def run(self) -> Report:
        begin = time.monotonic()
        end = begin + 60 * self._options.minutes
        self._crew.start(self._options.max_world)
        for _ in range(_SETTLE):
            self._crew.step()
        number = 0
        while time.monotonic() < end and number != self._options.max_faults:
            draw = random.Random(f"{self._options.seed}/{number}")
            kind = choose_kind(self._kinds, self._options.seed, number, draw)
            if kind.cuts_state and self._crew.num_checkpoints < 2:
                self._crew.step()
                continue
            self._one(number, kind, draw)
            number += 1
        report = self._report
        report.rows = [row for row in self._rows.values() if row.times]
        crew = self._crew
        report.batches, report.samples, report.rounds = crew.num_batches, crew.num_samples, crew.num_rounds
        report.seconds = time.monotonic() - begin
        return report

    def _one(self, number: int, kind: Kind, draw: random.Random) -> None:
        """Let one fault happen, until some steps have come behind it."""
        crew, row = self._crew, self._rows[kind.name]
        crew.findings, crew.is_damaged = Findings(), kind.damages
        self._stepped_at = time.monotonic()
        self._late |= set(kind.ends) - {KILLED}
        trial = _Trial(kind, Scene(self._stage, crew, draw), self._late)
        notes, longest = [], 0.0
        num_settled = num_before = 0
        while num_settled < _SETTLE:
            try:
                if not trial.has_begun and num_before < _MAX_BEFORE and not trial.has_victims:
                    num_before += 1
                    crew.step()
                    self._stepped_at = time.monotonic()
                    continue
                crew.step(None if trial.has_begun else trial.begin)
            except (EndedError, HangError, OrderError) as error:
                notes.append(f"{type(error).__name__}: {error}")
                trial.saw(error)
                if trial.num_ends > _MAX_ENDS:
                    raise ConfigError(
                        f"fault {number} ({kind.name}) ended the run {trial.num_ends} times in a row, so it cannot go "
                        f"on: {error}"
                    ) from error
                if isinstance(error, HangError):
                    crew.show_stacks()
                trial.wait()
                self._resume(kind, error, draw)
                num_settled = 0
            else:
                now = time.monotonic()
                longest, self._stepped_at = max(longest, now - self._stepped_at), now
                num_settled += trial.is_healed
        found = crew.findings
        if kind.cuts_state and not trial.was_refused:
            found.silent += 1
            notes.append("a state that was cut was taken")
        is_sound = trial.is_sound and not (found.lost or found.repeated or found.silent)
        row.times += 1
        row.survived += is_sound
        row.resumed += is_sound and trial.num_ends > 0
        for name in ("named", "lost", "repeated", "silent"):
            setattr(row, name, getattr(row, name) + getattr(found, name))
        row.longest_wait_s = max(row.longest_wait_s, longest)
        kept = [f"fault {number} ({kind.name}): {note}" for note in [*notes, *found.notes]]
        self._report.notes += kept[: _MAX_NOTES - len(self._report.notes)]
        self._tell(f"{number} {kind.name}: {'survived' if is_sound else 'FAILED'}, longest wait {longest:.1f} s")

    def _resume(self, kind: Kind, error: Exception, draw: random.Random) -> None:
        """Start all ranks from the last checkpoint, or the one before where that was refused."""
        self._crew.kill()
        failed = error.failed if isinstance(error, EndedError) else None
        if kind.cuts_state and failed is not None and failed.kind == "StateError":
            self._crew.go_back()
        self._crew.start(draw.randint(1, self._options.max_world))
        self._late.clear()
        self._late |= set(kind.ends) - {KILLED}


class _Trial:
    """One fault while it lasts."""

    def __init__(self, kind: Kind, scene: Scene, late: Collection[str]) -> None:
        self._kind, self._scene, self._late = kind, scene, late
        self._healed = threading.Event()
        self._delay_s = scene.draw.random() * _MAX_DELAY_S
        self._seconds = scene.draw.uniform(*kind.seconds)
        self.num_ends = 0
        self.has_begun = False
        self.is_sound = True
        self.was_refused = False

    @property
    def has_victims(self) -> bool:
        """Tell whether there is a builder, if there can be one: they may all be starting."""
        return not self._scene.stage.has_builders or bool(self._scene.builders())

    @property
    def is_healed(self) -> bool:
        return self._healed.is_set()

    def begin(self) -> None:
        """Act in the middle of a step, and be healed after a time."""
        self.has_begun = True
        time.sleep(self._delay_s)
        heal = self._kind.act(self._scene)
        if heal is None:
            self._healed.set()
            return

        def end() -> None:
            try:
                heal()
            finally:
                self._healed.set()

        timer = threading.Timer(self._seconds, end)
        timer.daemon = True
        timer.start()

    def wait(self) -> None:
        """Wait until it is healed."""
        if self.has_begun:
            self._healed.wait()

    def saw(self, error: Exception) -> None:
        """Judge the end of a trainer: only what the fault itself does to it is what a resume is for."""
        self.num_ends += 1
        self.is_sound = self.is_sound and may_end(self._kind, error, self._late)
        failed = error.failed if isinstance(error, EndedError) else None
        self.was_refused = self.was_refused or (failed is not None and failed.kind == "StateError")


def may_end(kind: Kind, error: Exception, late: Collection[str] = ()) -> bool:
    """Tell whether a fault may end a run like this: by a kill of the trainer, or by a sentence that names the fault.

    `late` are errors that faults before it may have caused, in batches that were built ahead.
    """
    if not isinstance(error, EndedError):
        return False
    failed = error.failed
    return KILLED in kind.ends if failed is None else failed.is_ours and failed.kind in {*kind.ends, *late}


def choose_kind(kinds: Sequence[Kind], seed: int, number: int, draw: random.Random) -> Kind:
    """Return the kind of a fault: each once, in an order of the seed, and then by their weights."""
    if number < len(kinds):
        return random.Random(f"{seed}/order").sample(kinds, len(kinds))[number]
    return draw.choices(kinds, [kind.weight for kind in kinds])[0]


def _kinds_for(stage: Stage, only: Sequence[str]) -> list[Kind]:
    """Return the faults that the recipe can meet."""
    kinds = list(PROCESS_KINDS["trainers"])
    if stage.has_builders:
        kinds += PROCESS_KINDS["builders"]
        if stage.has_servers:
            kinds += PROCESS_KINDS["servers"]
    if stage.shards:
        kinds += DATA_KINDS["shards"]
    if stage.proxy is not None:
        kinds += DATA_KINDS["server"]
        if stage.cache is not None:
            kinds += DATA_KINDS["cache"]
    chosen = [kind for kind in kinds if not only or kind.name.startswith(tuple(only))]
    if not chosen:
        raise ConfigError(
            f"no fault of this recipe begins with {' or '.join(only)}, so nothing would happen; there are: "
            f"{', '.join(kind.name for kind in kinds)}"
        )
    return chosen
