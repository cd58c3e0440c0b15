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
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from vlm_stream.dispatch import build_inline
from vlm_stream.errors import BadSampleError, ConfigError, StateError
from vlm_stream.options import StreamOptions
from vlm_stream.planning import open_plan
from vlm_stream.state import RunState
from vlm_stream.storage import join_url
from vlm_stream.stream import VLMStream
from vlm_stream.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vlm_stream.blueprint import Planned
    from vlm_stream.build import RawSample
    from vlm_stream.ledger import BadSample
    from vlm_stream.planning import Plan
    from vlm_stream.recipe import Sources

__all__ = ["PlannedSource", "Stages", "planned", "to_dict"]

PLACE: Final = "__place__"
_KEY: Final = "planned_source"
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


class PlannedSource(IterableDataset[dict[str, Any]]):
    """Samples of one data-parallel rank in planned order, and the state of what was consumed.

    In one process, what was handed out counts as consumed. In DataLoader workers nobody there knows what the trainer
    has taken: keep `__place__` in the batches and `note` it. A pipeline must keep the order of samples (the plan has
    shuffled them), and all ranks consume equally many. Iterating again after the end delivers the next epoch.
    """

    def __init__(self, stream: VLMStream, block: int, handler: Callable[[Exception], Any] | None) -> None:
        """Keep the settings; nothing is opened before iteration starts."""
        super().__init__()
        if block < 1:
            raise ConfigError(f"batch_size is {block}, but a batch has at least one sample.")
        self._stream, self._block, self._handler = stream, block, handler
        self._base = RunState()
        self._left: list[int] = []
        """Units behind the base that are not consumed, though later ones are: they come first."""
        self._skip = 0
        """Units behind the base that are consumed, or in `_left`."""
        self._taken: dict[tuple[int, int], int] = {}
        """(lane, lanes) -> the position after the last consumed one of that lane."""
        self._newest: tuple[int, Planned] | None = None
        self._used_by_workers = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def samples_per_epoch(self) -> int:
        """Return how many samples this rank gets in an epoch (one fewer on some ranks, if they do not divide)."""
        return len(self._stream)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this worker's samples, from where the source stands."""
        self._fold()
        worker = get_worker_info()
        lane, lanes = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker:
            self._used_by_workers.fill_(1)
        plan, world = self._plan(), self._stream.world
        positions = self._positions(plan, world)
        first = next(positions, None)
        if first is None and self._base.plan is not None:  # all of this epoch was consumed
            self._base = RunState(plan=self._after_skip(plan), rounds=self._base.rounds + 1)
            self._left, self._skip = [], 0
            plan = self._plan()
            positions = self._positions(plan, world)
            first = next(positions, None)
        everything = positions if first is None else itertools.chain([first], positions)
        mine = (pair for pair in everything if pair[0] // self._block % lanes == lane)
        numbers: list[int] = []

        def blueprints() -> Iterator[Planned]:
            for number, blueprint in mine:
                numbers.append(number)
                yield blueprint

        for blueprint, delivery in build_inline(blueprints(), plan.build, self._stream.options.prefetch_bytes):
            number = numbers.pop(0)
            for bad in delivery.bad:
                if not self._handle(bad):
                    return
            samples: Sequence[RawSample] = delivery.batch["samples"]
            if worker is None:
                self._taken[lane, lanes] = number + 1
                self._newest = number, blueprint
            for sample in samples:
                (piece,) = blueprint.blueprint.rows[0]
                yield {**to_dict(sample, piece.span.root), PLACE: f"{number}:{lane}/{lanes}"}

    def note(self, places: str | Iterable[str]) -> None:
        """Count samples as consumed, by their `__place__`, and with each all that came before it from its worker."""
        for place in [places] if isinstance(places, str) else places:
            number, _, rest = str(place).partition(":")
            lane, _, lanes = rest.partition("/")
            if not (number.isdecimal() and lane.isdecimal() and lanes.isdecimal()):
                raise StateError(
                    f"{place!r:.40} is not the __place__ of a sample, so nothing can be noted; keep it in the batches: "
                    f"wds.to_tuple('jpg', 'json', '__place__')"
                )
            key = int(lane), int(lanes)
            self._taken[key] = max(self._taken.get(key, 0), int(number) + 1)

    def state_dict(self) -> dict[str, str]:
        """Return what was consumed, as one text under one key."""
        if self._used_by_workers.item() and not self._taken:
            raise StateError(
                "the samples were handed out in DataLoader workers, and how many of them the trainer has consumed is "
                "not known here, so a state would repeat them; keep '__place__' in the batches and call "
                "source.note(places) for each batch"
            )
        self._fold()
        value = {**self._base.to_dict(), "left": self._left, "skip": self._skip}
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
        self._base, self._left, self._skip = RunState.from_dict(value), left, skip
        self._taken, self._newest = {}, None
        self._used_by_workers.zero_()

    def _plan(self) -> Plan:
        return self._stream.plan(self._base.rounds * (self._stream.options.epochs or 0))

    def _positions(self, plan: Plan, world: World) -> Iterator[tuple[int, Planned]]:
        """Yield this rank's positions with what is there: first the units that were left, then the plan behind them."""
        own = {unit: at // world.size for at, unit in enumerate(self._left) if at % world.size == world.rank}
        cursor = self._base.plan
        if self._skip:
            one = plan.blueprints(World(rank=0, size=1), cursor)
            last: Planned | None = None
            for unit, last in enumerate(itertools.islice(one, self._skip)):
                if unit in own:
                    yield own[unit], last
            cursor = cursor if last is None else last.state()
        begin = self._num_left_positions(world)
        yield from enumerate(plan.blueprints(world, cursor), begin)

    def _num_left_positions(self, world: World) -> int:
        return -(-len(self._left) // world.size)

    def _after_skip(self, plan: Plan) -> dict[str, Any] | None:
        """Return the cursor behind the units that are skipped."""
        cursor = self._base.plan
        steps = plan.planner.steps(self._stream.options.shape(1), cursor)
        for step in itertools.islice(steps, self._skip):
            cursor = step.state_after()
        return cursor

    def _fold(self) -> None:
        """Move the base, and what is left and skipped behind it, to what was consumed since."""
        if not self._taken:
            return
        (lanes,) = {lanes for _, lanes in self._taken} if len({lanes for _, lanes in self._taken}) == 1 else (None,)
        if lanes is None:
            raise StateError("places of two DataLoaders were noted, so what was consumed is unknown; note those of one")
        world, plan = self._stream.world, self._plan()
        end = max(self._taken.values())
        open_positions = [at for at in range(end) if at >= self._taken.get((at // self._block % lanes, lanes), 0)]
        prefix = open_positions[0] if open_positions else end
        begin = self._num_left_positions(world)
        units = [unit for at in open_positions for unit in self._units(at, begin, world)]
        if end <= begin:
            done = {unit for at in range(end) if at not in open_positions for unit in self._units(at, begin, world)}
            self._left = [unit for unit in self._left if unit not in done]
        elif prefix < begin:
            self._left, self._skip = units, self._skip + (end - begin) * world.size
        else:
            shift = self._skip + (prefix - begin) * world.size
            self._base = RunState(plan=self._cursor_at(prefix, begin, plan, world), rounds=self._base.rounds)
            self._left, self._skip = [unit - shift for unit in units], (end - prefix) * world.size
        self._taken, self._newest = {}, None

    def _units(self, position: int, begin: int, world: World) -> list[int]:
        """Return the units of all ranks at a position, counted from the base."""
        if position < begin:
            return self._left[position * world.size : (position + 1) * world.size]
        first = self._skip + (position - begin) * world.size
        return list(range(first, first + world.size))

    def _cursor_at(self, position: int, begin: int, plan: Plan, world: World) -> dict[str, Any] | None:
        """Return the cursor behind all positions before this one."""
        if self._newest is not None and self._newest[0] == position - 1:
            state: dict[str, Any] | None = self._newest[1].state()
            return state
        cursor = self._after_skip(plan)
        steps = plan.planner.steps(self._stream.options.shape(world.size), cursor)
        for step in itertools.islice(steps, position - begin):
            cursor = step.state_after()
        return cursor

    def _handle(self, bad: BadSample) -> bool:
        error = BadSampleError(bad.stage, bad.reason, f"{bad.shard}, sample '{bad.sample}': {bad.detail}")
        if self._handler is None:
            raise error
        return bool(self._handler(error))


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
