"""How many batches a round has: counted from the plan, or estimated from its first windows.

Enters: a stream's datasets and options, a world size, a state. Leaves: numbers. Only indexes are read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from vlm_stream.options import StreamOptions
from vlm_stream.recipe import SourceOptions

if TYPE_CHECKING:
    from vlm_stream.plan import Count, Planner
    from vlm_stream.planning import Plan
    from vlm_stream.state import RunState

_PROBED_WINDOWS: Final = 4


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """About how many batches there are."""

    batches: int
    error: int  # two standard deviations, from the spread of the windows that were looked at


def is_endless(options: StreamOptions) -> bool:
    """Tell whether a round has no end."""
    return options.train and (options.epochs is None or options.stop == "never")


def length_key(sources: Sequence[SourceOptions], options: StreamOptions, world_size: int) -> str:
    """Return what the number of batches depends on, besides what a state must find again in any case."""
    values = [
        asdict(options.shape(world_size)),
        [options.epochs, options.stop, options.weigh_by, options.barrier, options.horizon, options.allow],
        [[source.name, source.weight, source.has_weight, *sorted(source.weights.items())] for source in sources],
    ]
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()


def count_rounds(plan: Plan, world_size: int, state: RunState) -> Iterator[Count]:
    """Yield what is left of the present round, then the next rounds, one by one and without end."""
    options = plan.build.options
    shape, place, planner = options.shape(world_size), state.plan, plan.planner
    while True:
        count = planner.count(shape, place)
        yield count
        place = count.end
        planner = planner.with_config(
            replace(planner.config, epochs=(planner.config.epochs or 0) + (options.epochs or 0))
        )


def estimate_length(plan: Plan, world_size: int) -> LengthEstimate:
    """Estimate the batches of a round from the units that its first windows are cut into."""
    options, planner = plan.build.options, plan.planner
    shape = options.shape(world_size)
    draws, units, ended = _probe(planner)
    if ended:
        exact = planner.count(shape).micro_batches
        return LengthEstimate(exact, 0)
    per_draw = sum(units) / sum(draws)
    total = _num_draws(planner)
    deviations = [u / d - per_draw for u, d in zip(units, draws, strict=True)]
    spread = math.sqrt(sum(x * x for x in deviations) / max(len(deviations) - 1, 1))
    # The mean of k windows stands for all of them, and for those that are still to come.
    num_windows = total / options.window
    error = 2 * spread * total * math.sqrt(1 / len(draws) + 1 / num_windows)
    steps = math.ceil(total * per_draw / shape.units_per_step)
    return LengthEstimate(
        steps * shape.micro_batches, (math.ceil(error / shape.units_per_step) + 1) * shape.micro_batches
    )


def _probe(planner: Planner) -> tuple[list[int], list[int], bool]:
    """Plan the first windows: the samples that left with each, its units, and whether the stream ended there."""
    draws: list[int] = []
    units: list[int] = []
    for window in itertools.islice(planner.windows(), _PROBED_WINDOWS):
        start, after = window.start, window.after
        draws.append(after.draw - start.draw + len(start.carry) - len(after.carry))
        units.append(window.num_units)
        if window.is_last:
            return draws, units, True
    return draws, units, len(draws) < _PROBED_WINDOWS


def _num_draws(planner: Planner) -> float:
    """Return about how many samples are drawn in a round."""
    terms, epochs = planner.terms, planner.config.epochs or 1
    lengths = [
        (stream.epoch_length * epochs, share) for stream, share in zip(planner.streams, terms.shares, strict=True)
    ]
    if terms.stop == "each":
        return sum(length for length, share in lengths if share > 0)
    until = [length / share for length, share in lengths if share > 0]
    return max(until) if terms.stop == "all" else min(until)
