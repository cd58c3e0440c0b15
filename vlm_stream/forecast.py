"""The plan tells the node cache which shards will be read when.

Enters: a plan, the state from which it goes on, and then each batch that is handed out. Leaves: a table in the folder
of the cache, which its processes read (`storage/foresight.py`).
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.plan import shard_uses
from vlm_stream.storage import Forecast, ShardKey, cache_folder, scheme_of, uses_of

if TYPE_CHECKING:
    from vlm_stream.blueprint import Blueprint
    from vlm_stream.planning import Plan

logger = logging.getLogger(__name__)

_MOST_USES: Final = 1 << 16
_MOVE_S: Final = 2.0


class PlanForecast:
    """A plan's table; it is written again when most of it has passed."""

    def __init__(self, plan: Plan, world_size: int, state: dict[str, Any] | None) -> None:
        """Write it."""
        start = plan.planner.start(state)
        self._plan, self._world_size = plan, world_size
        self._positions = np.array(start.window.positions, dtype=np.int64)
        self._shares = np.array(plan.planner.terms.shares)
        self._draws = 0
        self._moved = time.monotonic()
        self._table: Forecast
        self._last: float
        self._write()

    def saw(self, blueprint: Blueprint) -> None:
        """Note a batch that was handed out: other ranks have taken about as much."""
        self._draws += blueprint.work.samples * self._world_size
        now = time.monotonic()
        if now - self._moved < _MOVE_S:
            return
        self._moved = now
        self._table.move(self._draws)
        if self._draws > self._last / 2:
            self._positions += (self._draws * self._shares).astype(np.int64)
            self._draws = 0
            self.close()
            try:
                self._write()
            except OSError as error:  # the batch is handed out all the same; the old table is closed, and says nothing
                self._last = math.inf
                _say_untold(self._plan, error)

    def close(self) -> None:
        """Remove the table."""
        self._table.close()

    def _write(self) -> None:
        plan = self._plan
        uses = shard_uses(plan.planner, self._positions.tolist(), _MOST_USES)
        each = [dataset.shard_keys() for dataset in plan.datasets.opened]
        firsts = np.cumsum([0, *map(len, each)])
        keys: dict[ShardKey, int] = {}  # sources that are entries of one dataset have the same shards
        number = np.array([keys.setdefault(key, len(keys)) for own in each for key in own], dtype=np.int64)
        numbers = number[firsts[uses.sources] + uses.shards]
        # Samples are fetched some time before they are handed out, and some are carried into later windows.
        slack = 2 * plan.planner.config.window
        table = uses_of(numbers, uses.begins - slack, uses.ends + slack)
        lasts = [float(uses.begins[uses.sources == source].max()) for source in np.unique(uses.sources)]
        self._last = min(lasts) if len(uses.begins) >= _MOST_USES else math.inf
        self._table = Forecast(cache_folder(plan.build.options.cache_dir or ""), list(keys), table)


def open_forecast(plan: Plan, world_size: int, state: dict[str, Any] | None) -> PlanForecast | None:
    """Return the table of a plan; None where nothing is cached, or it cannot be written."""
    options = plan.build.options
    is_remote = any(scheme_of(dataset.tars) != "file" for dataset in plan.datasets.opened)
    if options.read().cache_dir is None or not is_remote:
        return None
    try:
        return PlanForecast(plan, world_size, state)
    except OSError as error:
        _say_untold(plan, error)
        return None


def _say_untold(plan: Plan, error: OSError) -> None:
    logger.warning(
        "what will be read cannot be told to the node cache in %s (%s), so it keeps what was used last; make room "
        "there, or name another folder with cache_dir",
        plan.build.options.cache_dir,
        error.strerror or error,
    )
