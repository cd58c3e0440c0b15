"""What a plan will do in a given world, and when: a report, and the samples of a step or the step of a sample.

Enters: a planner, the shape of a step; for requests, a function of the readers that counts those of a batch. Leaves:
`PlanReport` and `PlannedSample`, plain values. Nothing is fetched, nothing decoded. Single samples are found by
planning ahead, and only the steps in question are assigned.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import InputError
from vlm_stream.plan.planner import Planner
from vlm_stream.plan.steps import Horizon, Step
from vlm_stream.plan.units import packs_lower_bound
from vlm_stream.plan.values import Dropped, Ints, PackConfig, Ref, StepShape, take_rows

_MAX_COUNTED = 100_000  # samples whose requests are counted; they stand for the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan in numbers. Imbalances are max/mean over ranks, averaged over steps: 1 is perfect."""

    fill: float
    """Share of token slots that hold tokens."""
    padding: float
    """The rest: rows padded to the pack size, or to the longest row of their micro-batch."""
    packs: int
    """Units in the steps looked at: packs, groups or samples."""
    packs_lower_bound: int
    """Packs that no algorithm can go below (Martello-Toth L2); without packing the number of units."""
    steps: int
    """Steps looked at; all of them when `complete`."""
    complete: bool
    """Whether the run ends within the steps looked at."""
    steps_per_epoch: float
    """Steps in an epoch; projected from the samples drawn when not all were looked at."""
    samples: int
    tokens: int
    fillers: int
    """Rows without labels in the last step."""
    llm_imbalance_step: float
    vit_imbalance_step: float
    total_imbalance_step: float
    decode_imbalance_step: float | None
    """Of decoding videos; None: its cost is not known of any."""
    llm_imbalance_micro: float
    vit_imbalance_micro: float
    total_imbalance_micro: float
    tokens_by_source: dict[str, int]
    samples_by_source: dict[str, int]
    dropped: dict[str, int]
    """Samples left out or shortened, by reason."""
    dropped_by_source: dict[str, dict[str, int]]
    live_shards: float
    """Shards that a window takes samples from."""
    variance_inflation: float
    """Sum over shards of the squared samples in a step, by the step's samples: 1 when all are from different shards."""
    repeat_rate: float
    """Share of neighbouring samples of the stream that come from the same shard."""
    state_bytes: int
    """Largest state, as JSON, also in the middle of steps."""
    requests_per_sample: float | None
    """Requests to the store, merged within a micro-batch of one rank; None: nobody counts them."""
    requests_per_step: float | None
    bytes_per_step: float | None
    bytes_per_sample: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Tally:
    """Adds up steps."""

    def __init__(
        self, planner: Planner, count_requests: Callable[[Sequence[PlannedSample]], tuple[int, int]] | None
    ) -> None:
        self.planner = planner
        self.count_requests = count_requests
        self.sums: Counter[str] = Counter()
        self.means: dict[str, list[float]] = {}
        self.sources: dict[str, Counter[int]] = {"samples": Counter(), "tokens": Counter()}
        self.dropped: Counter[tuple[int, str]] = Counter()
        self.lengths: list[Ints] = []
        self.windows: set[int] = set()
        self.state_bytes = 0

    def mean(self, name: str, value: float) -> None:
        self.means.setdefault(name, []).append(float(value))

    def add(self, step: Step) -> None:
        table, numbers = step.table, step.numbers()  # [micro, rank, row]
        real = numbers >= 0
        columns = (table.llm, table.vit, table.decode, table.tokens)
        llm, vit, decode, tokens = (np.where(real, column[numbers], 0) for column in columns)
        self.sums.update(steps=1, units=int(real.sum()), fillers=int((~real).sum()), tokens=int(tokens.sum()))
        self._slots(tokens, real)
        self._imbalance(llm.sum(axis=2), vit.sum(axis=2), decode.sum(axis=2))
        self._samples(step, numbers[real])
        self._requests(step)
        fresh = [window for window in table.windows if window.start.number not in self.windows]
        self.windows.update(window.start.number for window in fresh)
        for window in fresh:
            self._window(window.samples.refs)
        self.drop(step.dropped)
        if fresh or not self.sums["steps"] % 64:  # what is carried, the bulk of a state, changes with the window
            middle = max(step.micro_begin, (step.shape.micro_batches - 1) // 2)
            self.state_bytes = max(self.state_bytes, *(len(json.dumps(step.state_after(m))) for m in (middle, None)))

    def drop(self, notes: Sequence[Dropped]) -> None:
        self.dropped.update((note.ref.source, note.reason) for note in notes)

    def _slots(self, tokens: Ints, real: npt.NDArray[np.bool_]) -> None:
        mode = self.planner.config.mode
        if isinstance(mode, PackConfig):
            self.sums["slots"] += int(real.sum()) * mode.pack_size
        else:
            self.sums["slots"] += int(tokens.max(axis=2).sum()) * tokens.shape[2]

    def _imbalance(self, llm: Ints, vit: Ints, decode: Ints) -> None:
        for name, load in (("llm", llm), ("vit", vit), ("total", llm + vit), ("decode", decode)):  # [micro, rank]
            if load.any():
                step = load.sum(axis=0)
                self.mean(f"{name}_step", step.max() / step.mean())
                # Ranks wait at every micro-step: the sum of the maxima is the time that passes.
                self.mean(f"{name}_micro", load.max(axis=1).sum() / load.mean(axis=1).sum())

    def _samples(self, step: Step, units: Ints) -> None:
        """Count samples and shards of one step."""
        table = step.table
        refs, tokens = [], []
        for place, window in enumerate(table.windows):
            members, _ = take_rows(window.splits, table.unit[units[table.window[units] == place]])
            refs.append(window.samples.refs[members])
            tokens.append(window.samples.tokens[members])
        ref, length = np.concatenate(refs), np.concatenate(tokens)
        self.lengths.append(length)
        self.sums["samples"] += len(ref)
        for source in np.unique(ref[:, 0]).tolist():
            mine = ref[:, 0] == source
            self.sources["samples"][source] += int(mine.sum())
            self.sources["tokens"][source] += int(length[mine].sum())
        counts = np.unique((ref[:, 0] << 40) | ref[:, 1], return_counts=True)[1]
        self.mean("variance", (counts**2).sum() / counts.sum())

    def _requests(self, step: Step) -> None:
        """Count the requests of one step, until enough were counted."""
        if self.count_requests is None or self.sums["counted"] >= _MAX_COUNTED:
            return
        for _, found in itertools.groupby(_deliveries(step), key=lambda sample: (sample.micro, sample.rank)):
            if self.sums["counted"] >= _MAX_COUNTED:
                return
            samples = list(found)
            requests, num_bytes = self.count_requests(samples)
            self.sums.update(counted=len(samples), requests=requests, bytes=num_bytes)

    def _window(self, refs: Ints) -> None:
        shard = (refs[:, 0] << 40) | refs[:, 1]
        self.mean("live", len(np.unique(shard)))
        if len(shard) > 1:
            self.mean("repeat", float((shard[1:] == shard[:-1]).mean()))


def plan_report(
    planner: Planner,
    shape: StepShape,
    *,
    max_steps: int | None = None,
    count_requests: Callable[[Sequence[PlannedSample]], tuple[int, int]] | None = None,
    see: Callable[[Step], None] = lambda _: None,
) -> PlanReport:
    """Run through a plan, or its first `max_steps` steps, and add it up.

    `count_requests` returns the requests, and their bytes, for the samples of one micro-batch of one rank; `see` is
    shown each step.
    """
    tally = _Tally(planner, count_requests)
    complete = True
    left_out: list[Dropped] = []
    for step in planner.steps(shape, left_out=left_out):
        if max_steps is not None and tally.sums["steps"] >= max_steps:
            complete = False
            break
        tally.add(step)
        see(step)
    tally.drop(left_out)
    return _report(planner, shape, tally, complete=complete)


def _report(planner: Planner, shape: StepShape, tally: _Tally, *, complete: bool) -> PlanReport:
    sums = tally.sums
    names = [spec.name for spec in planner.sources]
    mean = {name: float(np.mean(values)) for name, values in tally.means.items()}
    mode = planner.config.mode
    bound = sums["units"]
    if isinstance(mode, PackConfig) and tally.lengths:
        lengths = -(-np.maximum(np.concatenate(tally.lengths), 1) // mode.alignment) * mode.alignment
        bound = packs_lower_bound(np.minimum(lengths, mode.capacity), mode.capacity)
    by_source: dict[str, dict[str, int]] = {name: {} for name in names}
    by_reason: Counter[str] = Counter()
    for (source, reason), count in sorted(tally.dropped.items()):
        by_source[names[source]][reason] = count
        by_reason[reason] += count
    fill = sums["tokens"] / max(sums["slots"], 1)
    per_step = sums["samples"] / max(sums["steps"], 1)
    requests, num_bytes = (
        sums[name] / max(sums["counted"], 1) if tally.count_requests else None for name in ("requests", "bytes")
    )
    return PlanReport(
        fill=fill,
        padding=1.0 - fill,
        packs=sums["units"],
        packs_lower_bound=bound,
        steps=sums["steps"],
        complete=complete,
        steps_per_epoch=_steps_per_epoch(planner, shape, tally),
        samples=sums["samples"],
        tokens=sums["tokens"],
        fillers=sums["fillers"],
        **{
            f"{cost}_imbalance_{span}": mean.get(f"{cost}_{span}", 1.0)
            for cost in ("llm", "vit", "total")
            for span in ("step", "micro")
        },
        decode_imbalance_step=mean.get("decode_step"),
        tokens_by_source={name: tally.sources["tokens"][i] for i, name in enumerate(names)},
        samples_by_source={name: tally.sources["samples"][i] for i, name in enumerate(names)},
        dropped=dict(by_reason),
        dropped_by_source=by_source,
        live_shards=mean.get("live", 0.0),
        variance_inflation=mean.get("variance", 0.0),
        repeat_rate=mean.get("repeat", 0.0),
        state_bytes=tally.state_bytes,
        requests_per_sample=requests,
        requests_per_step=None if requests is None else requests * per_step,
        bytes_per_step=None if num_bytes is None else num_bytes * per_step,
        bytes_per_sample=num_bytes,
    )


def _steps_per_epoch(planner: Planner, shape: StepShape, tally: _Tally) -> float:
    """Project the steps of an epoch from the samples that the steps looked at took from each source."""
    lost = tally.dropped
    taken = {
        number: tally.sources["samples"][number]
        + sum(count for (source, reason), count in lost.items() if source == number and reason != "truncated")
        for number in range(len(planner.sources))
    }
    epochs = [
        taken[number] / stream.epoch_length
        for number, stream in enumerate(planner.streams)
        if planner.terms.shares[number] > 0
    ]
    done = min(epochs) if planner.terms.stop in ("all", "each") else max(epochs)
    steps = tally.sums["units"] / shape.units_per_step
    return steps / done if done > 0 else 0.0


class PlannedSample(NamedTuple):
    """One sample at its place in the run."""

    step: int
    rank: int
    micro: int
    row: int  # row of the micro-batch: a pack, a group or a sample
    place: int  # place within the row
    tokens: int
    ref: Ref


def step_at(planner: Planner, shape: StepShape, step: int, *, state: dict[str, Any] | None = None) -> Step:
    """Return one step that is ahead; it has no state, because what comes before it is skipped."""

    def holds_step(first: int, horizon: Horizon) -> bool:
        return first + horizon.num_steps > step

    for found in planner.search(shape, state, holds_step):
        if found.index == step:
            return found
        if found.index > step:
            break
    raise InputError(
        f"Step {step} is not ahead: the run ends before it, or the state stands after it. Ask for another step, or "
        f"start from the beginning of the run or from an earlier state."
    )


def samples_of_step(
    planner: Planner, shape: StepShape, step: int, *, rank: int | None = None, state: dict[str, Any] | None = None
) -> tuple[PlannedSample, ...]:
    """Return the samples of one step, of one rank or of all, in the order of delivery."""
    found = step_at(planner, shape, step, state=state)
    return tuple(sample for sample in _deliveries(found) if rank is None or sample.rank == rank)


def find_samples(
    planner: Planner, shape: StepShape, refs: Collection[Ref], *, state: dict[str, Any] | None = None
) -> tuple[PlannedSample, ...]:
    """Return where each of some samples is delivered next; those that the stream ends before are left out."""
    wanted = set(refs)
    found: list[PlannedSample] = []

    def may_hold_sample(_first: int, horizon: Horizon) -> bool:
        return any((window.samples.refs == ref).all(axis=1).any() for window in horizon.table.windows for ref in wanted)

    steps = planner.search(shape, state, may_hold_sample)
    while wanted and (step := next(steps, None)) is not None:
        for sample in _deliveries(step):
            if sample.ref in wanted:
                wanted.remove(sample.ref)
                found.append(sample)
    return tuple(found)


def _deliveries(step: Step) -> Iterator[PlannedSample]:
    table, grid = step.table, step.numbers()
    for micro in range(step.micro_begin, grid.shape[0]):
        for rank in range(grid.shape[1]):
            for row, number in enumerate(grid[micro, rank].tolist()):
                if number < 0:
                    continue
                window, unit = table.windows[int(table.window[number])], int(table.unit[number])
                members = slice(window.splits[unit], window.splits[unit + 1])
                refs, tokens = window.samples.refs[members].tolist(), window.samples.tokens[members].tolist()
                for place, (ref, length) in enumerate(zip(refs, tokens, strict=True)):
                    yield PlannedSample(step.index, rank, micro, row, place, length, Ref(*ref))
