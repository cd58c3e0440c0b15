"""Synthetic sources for the plan's tests: columns made of (seed, source, shard), so that any process sees the same."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from vlm_stream.plan import PlanConfig, Planner, Ref, SampleColumns, SourceSpec, StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vlm_stream.plan import Step

Lengths = "Callable[[np.random.Generator, int], np.ndarray]"


def columns_of(tokens: np.ndarray, vision: np.ndarray | None = None) -> SampleColumns:
    tokens = np.asarray(tokens, dtype=np.int64)
    vision = tokens // 2 if vision is None else np.asarray(vision, dtype=np.int64)
    return SampleColumns(
        tokens=tokens,
        vision_tokens=vision,
        vision_patches=vision * 4,
        vision_squares=(vision * 4.0) ** 2,
        labels=tokens // 3,
    )


def join_columns(parts: Sequence[SampleColumns]) -> SampleColumns:
    names = [field.name for field in fields(SampleColumns) if getattr(parts[0], field.name) is not None]
    return SampleColumns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


class SyntheticReader:
    """Makes columns on demand and counts what it was asked for."""

    def __init__(self, sources: Sequence[SourceSpec], lengths: Any = None, seed: int = 0) -> None:
        self.sources = sources
        self.lengths = lengths or (lambda rng, n: np.clip(rng.lognormal(6.3, 0.9, n), 1, 9000).astype(np.int64))
        self.seed = seed
        self.asked: list[tuple[int, int]] = []

    def __call__(self, source: int, shards: Sequence[int]) -> SampleColumns:
        self.asked += [(source, shard) for shard in shards]
        return join_columns([self.of_shard(source, shard) for shard in shards])

    def of_shard(self, source: int, shard: int) -> SampleColumns:
        spec = self.sources[source]
        rng = np.random.default_rng([self.seed, *spec.name.encode(), shard])
        return columns_of(self.lengths(rng, spec.samples_per_shard[shard]))


def source(name: str, sizes: Iterable[int], **kwargs: Any) -> SourceSpec:
    return SourceSpec(name=name, samples_per_shard=tuple(sizes), digest=f"digest of {name}", **kwargs)


def planner(sources: Sequence[SourceSpec], config: PlanConfig, lengths: Any = None, **kwargs: Any) -> Planner:
    return Planner(sources, SyntheticReader(sources, lengths), config, **kwargs)


class Unit(NamedTuple):
    refs: tuple[Ref, ...]
    tokens: int


def units_of(step: Step, rank: int, micro: int) -> tuple[Unit | None, ...]:
    """Return the rows of one micro-batch, looked up one by one; None is a filler."""
    table = step.table
    units: list[Unit | None] = []
    for number in step.numbers()[micro, rank].tolist():
        if number < 0:
            units.append(None)
            continue
        window, unit = table.windows[table.window[number]], table.unit[number]
        members = window.samples.refs[window.splits[unit] : window.splits[unit + 1]]
        units.append(Unit(tuple(Ref(*ref) for ref in members.tolist()), int(table.tokens[number])))
    return tuple(units)


def rows(step: Step) -> list[tuple[int, int, tuple[Any, ...]]]:
    """Return what a step still delivers: (micro, rank, units)."""
    shape = step.shape
    return [
        (micro, rank, units_of(step, rank, micro))
        for micro in range(step.micro_begin, shape.micro_batches)
        for rank in range(shape.world_size)
    ]


def refs_of(steps: Iterable[Step]) -> list[Ref]:
    return [ref for step in steps for _, _, units in rows(step) for unit in units if unit for ref in unit.refs]


def unit_stream(plan: Planner, state: dict[str, Any] | None = None) -> list[tuple[Ref, ...]]:
    """Return the stream itself: one rank, one unit a step."""
    return [step.refs(0, 0)[0] for step in plan.steps(StepShape(), state)]


@pytest.fixture(scope="session")
def make() -> Callable[..., Any]:
    """Give tests the functions of this file under one name."""

    class Make:
        columns = staticmethod(columns_of)
        join = staticmethod(join_columns)
        reader = SyntheticReader
        source = staticmethod(source)
        planner = staticmethod(planner)
        units = staticmethod(units_of)
        rows = staticmethod(rows)
        refs = staticmethod(refs_of)
        stream = staticmethod(unit_stream)

    return Make
