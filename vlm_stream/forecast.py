"""The plan tells the node cache which shards will be read when.

Enters: a plan, the state from which it goes on, and then each batch that is handed out. Leaves: a table in the folder
of the cache, which its processes read (`storage/foresight.py`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.dispatch import build_inline
from vlm_stream.plan import shard_uses
from vlm_stream.storage import Forecast, ShardKey, Uses, cache_folder, scheme_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.blueprint import Planned
    from vlm_stream.build import Delivery
    from vlm_stream.plan import ShardUses
    from vlm_stream.planning import Plan

logger = logging.getLogger(__name__)

_MOST_USES: Final = 1 << 16
_MOVE_S: Final = 2.0


class PlanForecast:
    """A plan's table; it is written again when most of it has passed."""

    def __init__(self, plan: Plan, state: dict[str, Any] | None) -> None:
        """Write it."""
        self._plan = plan
        self._first = self._positions = np.array(plan.planner.start(state).window.positions, dtype=float)
        self._begun = self._moved = time.monotonic()
        self._table: Forecast | None = None
        self._uses = self._write(0.0)

    def saw(self, positions: tuple[float, ...]) -> None:
        """Note that a batch was handed out before which so many samples of each source were drawn."""
        now = time.monotonic()
        if self._table is None or now - self._moved < _MOVE_S:
            return
        self._moved = now
        found, uses = np.array(positions), self._uses
        moved = found - self._positions
        draws, rate = float(moved.sum()), float((found - self._first).sum()) / max(now - self._begun, 1e-3)
        self._table.move(draws, rate)
        strayed = np.abs(moved - draws * uses.shares).max()  # sources have left the mixture, or their weights changed
        if draws > uses.known / 2 or strayed > self._slack:
            self._positions = found
            self.close()
            try:
                self._uses = self._write(rate)
            except OSError as error:  # the batch is handed out all the same
                _say_untold(self._plan, error)

    def close(self) -> None:
        """Remove the table."""
        if self._table is not None:
            self._table.close()
        self._table = None

    @property
    def _slack(self) -> int:
        """Samples are fetched some time before they are handed out, and some are carried into later windows."""
        return 2 * self._plan.planner.config.window

    def _write(self, rate: float) -> ShardUses:
        plan = self._plan
        uses = shard_uses(plan.planner, self._positions.tolist(), _MOST_USES)
        each = [dataset.shard_keys() for dataset in plan.datasets.opened]
        firsts = np.cumsum([0, *map(len, each)])
        keys: dict[ShardKey, int] = {}  # sources that are entries of one dataset have the same shards
        number = np.array([keys.setdefault(key, len(keys)) for own in each for key in own], dtype=np.int64)
        table = Uses(number[firsts[uses.sources] + uses.shards], uses.begins - self._slack, uses.ends + self._slack)
        self._table = Forecast(cache_folder(plan.build.options.cache_dir or ""), list(keys), table, rate)
        return uses


def open_forecast(plan: Plan, state: dict[str, Any] | None) -> PlanForecast | None:
    """Return the table of a plan; None where nothing is cached, or it cannot be written."""
    options = plan.build.options
    is_remote = any(scheme_of(dataset.tars) != "file" for dataset in plan.datasets.opened)
    if options.read().cache_dir is None or not is_remote:
        return None
    try:
        return PlanForecast(plan, state)
    except OSError as error:
        _say_untold(plan, error)
        return None


def build_and_tell(
    plan: Plan, state: dict[str, Any] | None, blueprints: Iterator[Planned]
) -> Iterator[tuple[Planned, Delivery]]:
    """Build blueprints of a plan in this process, and tell the cache how far they are; the plan began at a state."""
    forecast = open_forecast(plan, state)
    try:
        # What builds has no name here: an error would keep it with this frame, and its threads with it.
        for planned, delivery in build_inline(blueprints, plan.build, plan.build.options.prefetch_bytes):
            if forecast is not None:
                forecast.saw(planned.positions)
            yield planned, delivery
    finally:
        if forecast is not None:
            forecast.close()


def _say_untold(plan: Plan, error: OSError) -> None:
    logger.warning(
        "what will be read cannot be told to the node cache in %s (%s), so it keeps what was used last; make room "
        "there, or name another folder with cache_dir",
        plan.build.options.cache_dir,
        error.strerror or error,
    )
