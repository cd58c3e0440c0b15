"""What was delivered against what was planned.

The plan is made here once more, from the user's own data, which no fault touches. Batch by batch names and samples must
be equal; over a whole round every planned sample must have come once; some batches are built again here, and must have
the same bytes.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from vlm_stream.blueprint import Blueprint, Planned
from vlm_stream.build import Builder
from vlm_stream.chaos.trainer import Arrival, SampleName, digest_of
from vlm_stream.length import is_endless
from vlm_stream.processors import open_processor
from vlm_stream.state import RunState
from vlm_stream.stream import VLMStream
from vlm_stream.world import World


class OrderError(Exception):
    """A batch came that is not the next one of the plan."""


@dataclass(slots=True)
class Findings:
    """What was wrong, in samples."""

    named: int = 0
    """Left out, with a line in the ledger."""
    lost: int = 0
    repeated: int = 0
    silent: int = 0
    """Left out without a word, or delivered with other bytes."""
    notes: list[str] = field(default_factory=list)

    def add(self, other: "Findings") -> None:
        """Add those of another."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class Checker:
    """Knows the plan, and what was delivered of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Take the arguments of a loader, without those of workers."""
        self._stream = VLMStream(**arguments)
        self._build_config = self._stream.plan().build
        self._builder: Builder | None = None
        self._expected: list[Iterator[Planned]] = []
        self._round_state: dict[str, Any] | None = None
        """Of the plan, where the present round began."""
        self._rounds = 0
        self._taken: Counter[SampleName] = Counter()
        """In the present round, up to the checkpoint before the last."""
        self._journals: list[list[SampleName]] = [[]]
        """What came between checkpoints, and since the last."""

    def modules(self) -> list[str]:
        """Return what every trainer imports."""
        processor = open_processor(self._stream.processor)
        return [] if processor is None else [type(processor).__module__]

    def close(self) -> None:
        """End the threads that read for comparison."""
        if self._builder is not None:
            self._builder.close()

    def begin(self, world_size: int, state: RunState) -> None:
        """Expect what a state promises to this many ranks."""
        plan = self._stream.plan(state.rounds * (self._stream.options.epochs or 0))
        self._expected = [plan.blueprints(World(rank, world_size), state.plan) for rank in range(world_size)]
        self._journals[-1].clear()

    def saved(self) -> None:
        """Note that all ranks have saved."""
        self._journals.append([])
        while len(self._journals) > 2:
            self._taken.update(self._journals.pop(0))

    def back_to_older(self) -> None:
        """Forget what came since the checkpoint before the last."""
        if len(self._journals) > 1:
            self._journals.pop()

    def end_round(self, state: RunState) -> Findings:
        """Compare a whole round with its plan made for one rank; `state` is that of the run behind it."""
        found = Findings()
        for journal in self._journals:
            self._taken.update(journal)
        if not is_endless(self._stream.options):
            plan = self._stream.plan(self._rounds * (self._stream.options.epochs or 0))
            planned: Counter[SampleName] = Counter()
            for each in plan.blueprints(World(0, 1), self._round_state):
                planned.update(self._names(each.blueprint))
            found.lost, found.repeated = (planned - self._taken).total(), (self._taken - planned).total()
            if found.lost or found.repeated:
                found.notes.append(f"round {self._rounds}: {found.lost} lost, {found.repeated} repeated")
        self._taken, self._journals = Counter(), [[]]
        self._round_state, self._rounds = state.plan, state.rounds
        return found

    def expects_end(self, rank: int) -> bool:
        """Tell whether the plan of a rank has ended."""
        return next(self._expected[rank], None) is None

    def check(self, rank: int, arrival: Arrival, *, compares: bool, damaged: bool) -> Findings:
        """Compare a batch with the next one of the plan; with `compares`, also its bytes with those built here.

        What is left out while no data are `damaged` is noted.
        """
        found = Findings()
        planned = next(self._expected[rank], None)
        if planned is None or planned.blueprint.name != arrival.name:
            wanted = "the end" if planned is None else str(planned.blueprint.name)
            raise OrderError(f"rank {rank} was given {arrival.name} where the plan has {wanted}")
        names = self._names(planned.blueprint)
        came = [name for row in arrival.rows for name in row]
        dropped = {(line.source, line.shard, line.sample) for line in planned.blueprint.dropped}
        bad = [name for name, _ in arrival.bad if name not in dropped]
        found.named = len(bad)
        missing, strange = Counter(names) - Counter(came), Counter(came) - Counter(names)
        unsaid = missing - Counter(bad)
        found.silent, found.repeated = unsaid.total(), strange.total()
        if unsaid or strange:
            found.notes.append(f"{arrival.name}: without a word {list(unsaid)[:3]}, not planned {list(strange)[:3]}")
        if bad and not damaged:
            found.notes += [f"{name}: left out, {why}" for name, why in arrival.bad if name not in dropped]
        if compares and not bad and digest_of(self._build(planned.blueprint)) != arrival.digest:
            found.silent += len(names)
            found.notes.append(f"{arrival.name}: its bytes are not those of the data")
        self._journals[-1] += names  # holes are delivered: they have their line in the ledger
        return found

    def _names(self, blueprint: Blueprint) -> list[SampleName]:
        sources = self._build_config.sources
        return [(sources[piece.ref[0]][0], piece.span.path, piece.key) for row in blueprint.rows for piece in row]

    def _build(self, blueprint: Blueprint) -> dict[str, Any]:
        if self._builder is None:
            self._builder = Builder(self._build_config)
        return self._builder.build(blueprint).batch
