"""Which source each draw of a mixture comes from, and when the mixture ends.

Enters: shares of the sources, the number of the draw, how far each source is and has to go. Leaves: the sources of
the next draws. A draw is a function of its number and the shares alone (multiples of the golden ratio, which fill the
unit interval evenly from any start and at any stride), so shares may change between two draws and positions stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import ConfigError
from vlm_stream.plan.values import SourceSpec

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """The next draws."""

    sources: npt.NDArray[np.int64]  # [n] Source of each draw
    next_draw: int  # number of the draw after them
    ended: bool  # whether the stop rule was met by the last of them


def shares_of(sources: Sequence[SourceSpec], weigh_by: str) -> tuple[float, ...]:
    """Turn weights into shares of draws that sum to 1."""
    raw = []
    for spec in sources:
        if not np.isfinite(spec.weight) or spec.weight < 0:
            raise ConfigError(f"Source '{spec.name}' has the weight {spec.weight}; give a finite number, 0 or more.")
        factor = {"samples": 1.0, "size": spec.num_samples * spec.sample_ratio, "tokens": 1.0 / spec.tokens_per_sample}
        raw.append(spec.weight * factor[weigh_by])
    total = sum(raw)
    if not total > 0:
        raise ConfigError(
            "All weights of the mixture are 0, so nothing can be drawn. Give one source a weight above 0."
        )
    return tuple(r / total for r in raw)


def source_of_draws(first: int, count: int, shares: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return [count] the sources of draws `first`, `first + 1`, ...; sources with share 0 never appear."""
    active = [i for i, share in enumerate(shares) if share > 0]
    if len(active) == 1:
        return np.full(count, active[0], dtype=np.int64)
    ends = list(accumulate(shares[i] for i in active))
    bounds = np.asarray([min(int(end / ends[-1] * 2**64), 2**64 - 1) for end in ends[:-1]], dtype=np.uint64)
    points = np.arange(first, first + count, dtype=np.uint64) * _GOLDEN  # wraps around: the fractional part
    return np.asarray(active, dtype=np.int64)[np.searchsorted(bounds, points, side="right")]


def draw(first: int, count: int, shares: Sequence[float], left: Sequence[int | None], stop: str) -> Draws:
    """Draw up to `count` samples, beginning with the draw of number `first`.

    `left` is what each source has still to deliver before it is done; None where it has no goal.
    """
    todo = [0 if n is None else n for n in left]
    has_goal = [n is not None and share > 0 for n, share in zip(left, shares, strict=True)]
    if stop == "each":
        return _draw_each(first, count, shares, todo, has_goal)
    sources = source_of_draws(first, count, shares)
    ends = [_draws_until(sources, i, todo[i]) for i, goal in enumerate(has_goal) if goal]
    if stop == "never" or not ends:
        return Draws(sources=sources, next_draw=first + count, ended=False)
    end = max(ends) if stop == "all" else min(ends)
    taken = min(end, count)
    return Draws(sources=sources[:taken], next_draw=first + taken, ended=end <= count)


def _draw_each(first: int, count: int, shares: Sequence[float], todo: list[int], has_goal: Sequence[bool]) -> Draws:
    parts = []
    while count > 0:
        open_shares = [s if not goal or n > 0 else 0.0 for s, goal, n in zip(shares, has_goal, todo, strict=True)]
        if not any(open_shares):
            break
        sources = source_of_draws(first, count, open_shares)
        ends = [_draws_until(sources, i, todo[i]) for i, goal in enumerate(has_goal) if goal and todo[i] > 0]
        taken = min([count, *ends])
        parts.append(sources[:taken])
        for i, drawn in enumerate(np.bincount(sources[:taken], minlength=len(shares)).tolist()):
            todo[i] -= drawn
        first += taken
        count -= taken
    ended = all(n <= 0 for n, goal in zip(todo, has_goal, strict=True) if goal) and any(has_goal)
    sources = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return Draws(sources=sources, next_draw=first, ended=ended)


def _draws_until(sources: npt.NDArray[np.int64], source: int, need: int) -> int:
    """Return after how many draws the source has come `need` times; more than there are when it does not."""
    if need <= 0:
        return 0
    where = np.flatnonzero(sources == source)
    return int(where[need - 1]) + 1 if need <= len(where) else len(sources) + 1
