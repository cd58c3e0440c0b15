"""A planned source for webdataset's pipelines: shuffled by the plan, resumable at any sample, elastic.

Enters: what a loader takes as sources, tars of others among it. Leaves: samples as webdataset has them: `__key__`,
`__url__`, and bytes by extension. It plans and fetches as `VLMStream` does; nothing is decoded here.

A source hands out positions 0, 1, 2, ... of its rank, in blocks of `batch_size` to one DataLoader worker after the
other, so that batches come in plan order. Its state says which units of the plan were consumed, not which positions,
so it fits any number of ranks and workers.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from vlm_stream.blueprint import Planned
from vlm_stream.build import RawSample
from vlm_stream.errors import BadSampleError, ConfigError, StateError
from vlm_stream.forecast import build_and_tell
from vlm_stream.ledger import BadSample
from vlm_stream.options import StreamOptions
from vlm_stream.planning import Plan, open_plan
from vlm_stream.recipe import Sources
from vlm_stream.state import RunState
from vlm_stream.storage import join_url
from vlm_stream.stream import VLMStream
from vlm_stream.world import World

PLACE: Final = "__place__"
"""Key of a sample under which its place in the plan travels."""
_KEY: Final = "planned_source"
_MAX_WORKERS: Final = 1024
_FIXED: Final = {"mode": "plain", "micro_batches": 1, "barrier": "none", "horizon": 1}


def planned(
    sources: Sources,
    *,
    batch_size: int = 1,
    handler: Callable[[Exception], Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> PlannedSource:
    """Return the first stage of a `webdataset.DataPipeline`.

    >>> pipeline = wds.DataPipeline(planned("shards/{000..031}.tar"), wds.decode("pil"))  # doctest: +SKIP

    Args:
        sources: As to `StreamLoader`: tars, folders, Energon datasets, URLs, or several of them with weights.
        batch_size: How many samples the pipeline puts into a batch: so many in a row go to one DataLoader worker.
        handler: webdataset's: is given the error of a bad sample, and returns whether to go on; by default it is
            raised.
        rank: Data-parallel rank; by default found when iteration starts (see `StreamLoader`).
        world_size: Number of data-parallel ranks, likewise.
        options: Those of `StreamOptions` that decide on the order: `seed`, `shuffle`, `epochs`, `window`, `store`.
    """
    fixed = sorted({"processor", "options", "collate_fn", *_FIXED} & set(options))
    if fixed:
        raise ConfigError(
            f"a planned source hands out single samples as bytes, so {' and '.join(fixed)} cannot be set; use a "
            f"StreamLoader for that"
        )
    stream = _ByteStream(
        sources,
        processor=None,
        options=StreamOptions.of(None, {**options, **_FIXED, "batch_size": 1}),
        rank=rank,
        world_size=world_size,
    )
    return PlannedSource(stream, batch_size, handler)


class _ByteStream(VLMStream):
    """Every sample counts, whatever its members are."""

    def plan(self, epochs_before: int = 0) -> Plan:
        if self._opened is None:
            self._opened = open_plan(self.sources, self.options, need="bytes")
        return self._opened.after(epochs_before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where an iteration begins; its positions are counted from here."""

    base: RunState = field(default_factory=RunState)
    left: tuple[int, ...] = ()
    """Units behind the base that are not consumed, though later ones are: they come first."""
    skip: int = 0
    """Units behind the base that are consumed, or in `left`."""
    tag: int = 0
    """A number made of all that was consumed before: equal starts have equal tags, in every process."""

    def tag_after(self, *what: object) -> int:
        return zlib.crc32(repr((self.tag, *what)).encode())


class _Board:
    """What copies of a source in DataLoader workers and in the trainer tell each other: numbers in shared memory.

    It has the notes of two iterations: a slow worker may look for the first when the second has its first note.
    """

    def __init__(self) -> None:
        # Rows: notes, notes, rounds that each worker has handed out, facts. Notes: tag, workers, position behind each.
        table = torch.zeros((4, 2 + _MAX_WORKERS), dtype=torch.int64)
        self._table = table.share_memory_()  # type: ignore[no-untyped-call]
        self._row = 0

    def facts(self) -> tuple[bool, bool, int]:
        """Tell whether workers have handed out samples, whether any was noted, and how many rounds were handed out."""
        is_used, is_noted, rounds = self._table[3, :3].tolist()
        return bool(is_used), bool(is_noted), rounds

    def begin(self, lane: int) -> None:
        self._table[3, 0] = 1
        self._table[2, lane] = 0

    def end(self, lane: int, lanes: int, rounds: int) -> None:
        """Say that a worker has handed out its part of a round; the last of them ends it for all."""
        self._table[2, lane] = rounds
        if bool((self._table[2, :lanes] >= rounds).all()):
            self._table[3, 2] = rounds

    def notes(self, tag: int) -> list[int]:
        """Return the position behind what was noted of each worker; empty: nothing was."""
        rows = (row[2 : 2 + int(row[1])].tolist() for row in self._table[:2] if row[1] and row[0] == tag)
        return next(rows, [])

    def note(self, tag: int, lane: int, lanes: int, number: int) -> None:
        row = self._table[self._row]
        if not row[1] or row[0] != tag:
            self._row = 1 - self._row
            row = self._table[self._row]
            row.zero_()
            row[0], row[1] = tag, lanes
        if row[1] != lanes:
            raise StateError("places of two DataLoaders were noted, so what was consumed is unknown; note those of one")
        if number < row[2 + lane]:
            raise StateError(
                "a sample was noted after later ones of its worker, so a stage shuffles or repeats what the source "
                "hands out, or a batch was noted twice, and what was consumed is unknown; keep the order of the "
                "source (its plan has shuffled the samples), and note each batch once"
            )
        row[2 + lane] = number + 1
        self._table[3, 1] = 1


class PlannedSource(IterableDataset[dict[str, Any]]):
    """Samples of one data-parallel rank in planned order, and the state of what was consumed.

    Consumed is what was noted: keep `__place__` in the batches and `note` it. A source in one process of which nothing
    was ever noted counts what it has handed out; stages that take samples ahead (`wds.batched` takes one) lose those.
    A pipeline must keep the order of samples (the plan has shuffled them), and all ranks consume equally many.
    Iterating again goes on behind what was consumed, after the end with the next epoch.
    """

    def __init__(self, stream: VLMStream, block: int, handler: Callable[[Exception], Any] | None) -> None:
        super().__init__()
        if block < 1:
            raise ConfigError(f"batch_size is {block}, but a batch has at least one sample.")
        self._stream, self._block, self._handler = stream, block, handler
        self._rounds, self._board = 0, _Board()  # rounds that this process has handed out, and what others know
        self._enter(_Start())

    def _enter(self, start: _Start) -> None:
        self._start = start
        self._handed = 0
        """Positions handed out in this process."""
        self._reached: tuple[int, Callable[[], dict[str, Any] | None] | None] = 0, None
        """A position, and the cursor behind all before it."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reached": (0, None)}

    @property
    def samples_per_epoch(self) -> int:
        """Return how many samples this rank gets in an epoch (one fewer on some ranks, if they do not divide)."""
        return len(self._stream)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        lane, lanes = (worker.id, worker.num_workers) if worker else (0, 1)
        *_, start = self._starts()
        self._enter(start)
        if worker:
            self._board.begin(lane)
        plan, begin = self._plan(start), self._num_left_positions(start)
        mine = (pair for pair in self._positions(start) if pair[0] // self._block % lanes == lane)
        numbers: list[int] = []

        def blueprints() -> Iterator[Planned]:
            for number, blueprint in mine:
                numbers.append(number)
                yield blueprint

        for blueprint, delivery in build_and_tell(plan, start.base.plan, blueprints()):
            number = numbers.pop(0)
            for bad in delivery.bad:
                if not self._handle(bad):
                    return
            samples: Sequence[RawSample] = delivery.batch["samples"]
            if worker is None:
                self._handed = number + 1
                if number >= begin:
                    self._reached = number + 1, blueprint.state
            for sample in samples:
                (piece,) = blueprint.blueprint.rows[0]
                yield {**to_dict(sample, piece.span.root), PLACE: f"{number}:{lane}/{lanes}:{start.tag}"}
        self._rounds = start.base.rounds + 1
        if worker:
            self._board.end(lane, lanes, self._rounds)

    def note(self, places: str | Iterable[str]) -> None:
        """Count samples as consumed, by their `__place__`, and with each all that came before it from its worker."""
        for tag, number, lane, lanes in sorted(map(_read_place, [places] if isinstance(places, str) else places)):
            if tag != self._start.tag:
                start = next((start for start in self._starts() if start.tag == tag), None)
                if start is None:
                    raise StateError(
                        "a sample was noted that was handed out before the last samples of another iteration were "
                        "noted, so what was consumed is unknown; note all batches of one iteration before the first "
                        "of the next, and iterate the DataLoader again where a stage repeats its source"
                    )
                self._enter(start)
            self._board.note(tag, lane, lanes, number)

    def state_dict(self) -> dict[str, str]:
        """Return what was consumed, as one text under one key."""
        if self._board.facts()[:2] == (True, False):
            raise StateError(
                "the samples were handed out in DataLoader workers, and how many of them the trainer has consumed is "
                "not known here, so a state would repeat them; keep '__place__' in the batches and call "
                "source.note(places) for each batch"
            )
        start = next(self._starts())
        value = {**start.base.to_dict(), "left": start.left, "skip": start.skip}
        return {_KEY: json.dumps(value, separators=(",", ":"))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind what was consumed, with any number of ranks and workers."""
        try:
            value = json.loads(state[_KEY])
            left, skip = value["left"], value["skip"]
            is_whole = type(skip) is int and all(type(unit) is int and 0 <= unit < skip for unit in left)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"this is not the state of a planned source (it has no '{_KEY}' text), so there is no place to go on "
                f"from; pass what state_dict() returned"
            ) from error
        if not is_whole:
            raise StateError("the state of the planned source is damaged; use an older checkpoint")
        base = RunState.from_dict(value)
        self._enter(_Start(base=base, left=tuple(left), skip=skip, tag=zlib.crc32(state[_KEY].encode())))
        self._rounds, self._board = 0, _Board()

    def _plan(self, start: _Start) -> Plan:
        return self._stream.plan(start.base.rounds * (self._stream.options.epochs or 0))

    def _starts(self) -> Iterator[_Start]:
        """Yield the place behind what was consumed, then the starts of the rounds after it; the last is to be used."""
        start, lanes, (_, is_noted, _) = self._start, self._board.notes(self._start.tag), self._board.facts()
        if lanes or (self._handed and not is_noted):
            start = self._moved(lanes or [self._handed])
        yield start
        while self._is_over(start):
            plan = self._plan(start)
            base = RunState(plan=self._cursor_behind(start, sys.maxsize, plan, 1), rounds=start.base.rounds + 1)
            start = _Start(base=base, tag=start.tag_after("round"))
            yield start

    def _is_over(self, start: _Start) -> bool:
        """Tell whether nothing of a round is to be handed out to this rank any more."""
        _, is_noted, rounds = self._board.facts()
        is_handed_out = start.base.rounds < max(self._rounds, rounds)
        if start == _Start() or (is_handed_out and not is_noted):
            return is_handed_out and not is_noted
        _, first = next(self._positions(start), (0, None))
        if first is None:
            return is_handed_out or not start.left
        return is_handed_out and not first.blueprint.rows[0]

    def _positions(self, start: _Start) -> Iterator[tuple[int, Planned]]:
        """Yield this rank's positions with what is there: first the units that were left, then the plan behind them."""
        plan, world = self._plan(start), self._stream.world
        own = {unit: at // world.size for at, unit in enumerate(start.left) if at % world.size == world.rank}
        cursor = start.base.plan
        if start.skip:
            one = plan.blueprints(World(rank=0, size=1), cursor)
            last: Planned | None = None
            for unit, last in enumerate(itertools.islice(one, start.skip)):
                if unit in own:
                    yield own[unit], last
            cursor = cursor if last is None else last.state()
        yield from enumerate(plan.blueprints(world, cursor), self._num_left_positions(start))

    def _num_left_positions(self, start: _Start) -> int:
        return -(-len(start.left) // self._stream.world.size)

    def _cursor_behind(self, start: _Start, num_steps: int, plan: Plan, world_size: int) -> dict[str, Any] | None:
        """Return the cursor behind what a start skips, and so many steps of a number of ranks."""
        cursor = start.base.plan
        for size, count in ((1, start.skip), (world_size, num_steps)):
            steps = plan.planner.steps(self._stream.options.shape(size), cursor) if count else ()
            last = deque(itertools.islice(steps, count), maxlen=1)
            cursor = last[0].state_after() if last else cursor
        return cursor

    def _moved(self, lanes: list[int]) -> _Start:
        """Return the place behind what was consumed: positions before one number for each lane."""
        start, size = self._start, self._stream.world.size
        end = max(lanes)
        open_positions = [at for at in range(end) if at >= lanes[at // self._block % len(lanes)]]
        prefix = open_positions[0] if open_positions else end
        begin = self._num_left_positions(start)
        left = [unit for at in open_positions for unit in self._units(at, begin)]
        tag = start.tag_after(lanes)
        if end <= begin:
            return replace(start, left=(*left, *start.left[end * size :]), tag=tag)
        if prefix < begin:
            return replace(start, left=tuple(left), skip=start.skip + (end - begin) * size, tag=tag)
        shift = start.skip + (prefix - begin) * size
        base = RunState(plan=self._cursor_at(prefix, begin), rounds=start.base.rounds)
        return _Start(base=base, left=tuple(unit - shift for unit in left), skip=(end - prefix) * size, tag=tag)

    def _units(self, position: int, begin: int) -> Sequence[int]:
        """Return the units of all ranks at a position, counted from the base."""
        start, size = self._start, self._stream.world.size
        if position < begin:
            return start.left[position * size : (position + 1) * size]
        first = start.skip + (position - begin) * size
        return range(first, first + size)

    def _cursor_at(self, position: int, begin: int) -> dict[str, Any] | None:
        """Return the cursor behind all positions before this one."""
        plan, size = self._plan(self._start), self._stream.world.size
        reached, state = self._reached
        if state is not None and begin <= reached <= position:
            cursor = self._cursor_behind(_Start(base=RunState(plan=state())), position - reached, plan, size)
        else:
            cursor = self._cursor_behind(self._start, position - begin, plan, size)
        self._reached = position, lambda: cursor
        return cursor

    def _handle(self, bad: BadSample) -> bool:
        error = BadSampleError(bad.stage, bad.reason, f"{bad.shard}, sample '{bad.sample}': {bad.detail}")
        if self._handler is None:
            raise error
        return bool(self._handler(error))


def _read_place(place: object) -> tuple[int, int, int, int]:
    """Return tag of the start, position, worker and number of workers."""
    parts = re.fullmatch(r"(\d+):(\d+)/(\d+):(\d+)", str(place))
    number, lane, lanes, tag = map(int, parts.groups()) if parts else (0, 0, 0, 0)
    if not lane < lanes <= _MAX_WORKERS:
        raise StateError(
            f"{place!r:.40} is not the __place__ of a sample, so nothing can be noted; keep it in the batches: "
            f"wds.to_tuple('jpg', 'json', '__place__')"
        )
    return tag, number, lane, lanes


def to_dict(sample: RawSample, root: str = "") -> dict[str, Any]:
    """Return a sample as webdataset has it: extensions in lower case, with bytes."""
    found: dict[str, Any] = {"__key__": sample.key, "__url__": join_url(root, sample.shard) if root else sample.shard}
    if sample.fields.subflavors:
        found["__subflavors__"] = sample.fields.subflavors
    return found | {name.lower(): bytes(content) for name, content in sample.members.items()}


class Stages:
    """webdataset's stages as `collate_fn` of a `StreamLoader` without a processor: they run in its workers.

    Each batch goes through the stages by itself: `{"samples": [what they yield]}`.
    """

    def __init__(self, *stages: Callable[[Iterable[Any]], Iterable[Any]]) -> None:
        """Take stages such as `wds.decode("pil")` and `wds.to_tuple("jpg", "json")`."""
        self._stages = stages

    def __call__(self, rows: Sequence[RawSample], _processor: Any) -> dict[str, Any]:
        """Return what the stages make of the samples of one batch."""
        found: Iterable[Any] = iter([to_dict(sample) for sample in rows])
        for stage in self._stages:
            found = stage(found)
        return {"samples": list(found)}
