"""A run as the run page shows it: of a saved state, or of a loader that is running in this process.

Enters: a state of the plan, a ledger's lines, or a loader. Leaves: `RunView`, plain values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from vlm_stream.errors import InputError
from vlm_stream.ledger import BadSample
from vlm_stream.plan import read_state
from vlm_stream.state import RunState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from vlm_stream.ledger import Ledger
    from vlm_stream.plan import Step
    from vlm_stream.view.steps import PlanBook

_SHOWN: Final = 200
"""Bad samples on a page."""
_RECENT: Final = 24
"""Steps whose samples are counted for the mixture."""


class LoaderLike(Protocol):
    """What is asked of a running loader."""

    ledger: Ledger

    def metrics(self) -> dict[str, float]:
        """Return counts, rates and times."""

    def builders(self) -> list[dict[str, Any]]:
        """Return what each builder has done."""

    def state_dict(self) -> dict[str, str]:
        """Return where it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The run that is looked at; nothing of it: there is none."""

    state: dict[str, Any] | None = None
    """Of its plan."""
    epochs_before: int = 0
    """Delivered by earlier rounds."""
    bad: tuple[BadSample, ...] = ()
    """Its ledger."""
    loader: LoaderLike | None = None
    """A run in this process, instead of a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """One source of a mixture."""

    name: str
    wanted: float
    """By its weight."""
    drawn: float
    """Of all samples that were drawn."""
    recent: float
    """Of the tokens or samples of some steps."""
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment."""

    is_live: bool
    rounds: int
    batches: int | None
    step: int
    total: int | None
    samples: int
    rates: dict[str, float]
    builders: tuple[Mapping[str, Any], ...]
    reasons: dict[str, int]
    bad: tuple[BadSample, ...]
    mixture: tuple[Mixed, ...]
    weighed: str
    """What weights count, and `Mixed.wanted` and `Mixed.recent` with them: `samples` or `tokens`."""
    lately: str
    """Which steps `Mixed.recent` is of."""


def read_ledger(path: Path) -> list[BadSample]:
    """Read the lines of a ledger's file.

    Raises:
        InputError: It cannot be read, or is no ledger.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [BadSample.from_json(line) for line in lines if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a ledger that can be read ({error}); give the file of ledger_path") from error


def run_view(book: PlanBook, loader: LoaderLike | None, bad: Sequence[BadSample]) -> RunView:
    """Return the run of a loader; without one, that of the state that the book stands at."""
    numbers: dict[str, float] = {}
    builders: tuple[Mapping[str, Any], ...] = ()
    rounds, batches = 0, None
    reasons = Counter(f"{line.stage}: {line.reason}" for line in bad)
    if loader is not None:
        run = RunState.from_dict(loader.state_dict())
        rounds, batches = run.rounds, run.batches
        numbers, builders = loader.metrics(), tuple(loader.builders())
        bad = tuple(loader.ledger.newest)
        reasons = Counter(loader.ledger.by_reason())
    read = None if book.now is None else read_state(book.now)
    delivered = None if read is None else read.delivered
    step = 0 if delivered is None else delivered.steps
    walk = book.run_walk()
    walk.start()
    mixture, lately = _mixture(book, {} if read is None else read.positions, step)
    return RunView(
        is_live=loader is not None,
        rounds=rounds,
        batches=batches,
        step=step,
        total=walk.total,
        samples=0 if delivered is None else delivered.samples,
        rates=numbers,
        builders=builders,
        reasons=dict(reasons.most_common()),
        bad=tuple(reversed(list(bad)[-_SHOWN:])),
        mixture=mixture,
        weighed=_weighed(book),
        lately=lately,
    )


def _weighed(book: PlanBook) -> str:
    """Return what the shares of sources are of; weights that count epochs make shares of samples."""
    return "tokens" if book.catalog.plan.planner.config.mixture.weigh_by == "tokens" else "samples"


def _mixture(book: PlanBook, positions: Mapping[str, int], step: int) -> tuple[tuple[Mixed, ...], str]:
    """Return what was drawn of each source, over the run and lately, beside what was wanted.

    Which samples stood in the steps before a state is not known: the run may have had other ranks. Where none are
    known, the next ones are looked at.
    """
    planner = book.catalog.plan.planner
    by_tokens = _weighed(book) == "tokens"
    weights = [source.weight for source in planner.sources]
    wanted = [weight / sum(weights) for weight in weights] if by_tokens else planner.terms.shares
    counts = np.zeros(len(wanted))
    walk, looked = book.run_walk(), 0
    begin, where = max(step - _RECENT, walk.first), "last"
    if begin >= step:
        begin, where = step, "next"
    for number in range(begin, step if where == "last" else step + _RECENT) if walk.is_near(step) else ():
        try:
            found = walk.step(number)
        except InputError:  # the run ends
            break
        looked += 1
        counts += _counted(found, len(wanted), by_tokens=by_tokens)
    drawn, recent = max(sum(positions.values()), 1), max(counts.sum(), 1.0)
    return tuple(
        Mixed(
            name=name,
            wanted=share,
            drawn=positions.get(name, 0) / drawn,
            recent=float(counts[number] / recent),
            samples=positions.get(name, 0),
        )
        for number, (name, share) in enumerate(zip(planner.terms.names, wanted, strict=True))
    ), f"in the {where} {looked} steps"


def _counted(step: Step, num_sources: int, *, by_tokens: bool) -> npt.NDArray[np.float64]:
    """Return [sources] the tokens, or the samples, of a step on all ranks."""
    table, numbers = step.table, step.numbers()
    found = np.zeros(num_sources)
    for number in numbers[numbers >= 0].tolist():
        window, unit = table.windows[int(table.window[number])], int(table.unit[number])
        at = slice(window.splits[unit], window.splits[unit + 1])
        tokens = window.samples.tokens[at] if by_tokens else None
        found += np.bincount(window.samples.refs[at, 0], tokens, minlength=num_sources)
    return found
