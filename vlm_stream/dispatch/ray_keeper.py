"""The keeper of a named pool: an actor that starts and ends its builders, more while they are busy.

It holds nothing that is not on the cluster: builders belong to no process and have names, so a keeper that is started
again, on another machine perhaps, goes on with those that there are.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.dispatch.ray_cluster import (
    NAMESPACE,
    builder_names,
    connect,
    find_keeper,
    has_pool,
    keeper_name,
    new_builder_name,
    no_pool_error,
    start_builder,
)
from vlm_stream.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from vlm_stream.loader_options import RayBuilders

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 5.0
_GONE_S: Final = 30.0
_START_S: Final = 300.0
_PERIOD_S: Final = 10.0
_BUSY: Final = 0.8
"""Builders that are busy for a larger share of their time are too few: trainers that have enough let them rest. It is
not all of it, for a builder waits while a finished batch is told of and the next one comes."""
_IDLE: Final = 0.5
_WANTED: Final = 0.65
"""So busy shall they be where there were too many."""
_QUIET_PERIODS: Final = 6
_ANSWERING: Final = 0.8
"""No more are started while fewer of them answer: the cluster may have no room."""


class Load:
    """How busy the builders of a pool are, and so how many there should be; it has no clock."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._seen: dict[str, tuple[float, float]] = {}
        self._num_quiet = 0

    def saw(self, now: float, busy_s: dict[str, float], num_builders: int) -> int:
        """Take in for how long each builder that answers was busy so far; return how many there should be."""
        before, self._seen = self._seen, {name: (now, seconds) for name, seconds in busy_s.items()}
        shares = [
            (seconds - before[name][1]) / max(now - before[name][0], 1e-9)
            for name, seconds in busy_s.items()
            if name in before and seconds >= before[name][1]
        ]
        within = min(max(num_builders, self._least), self._most)
        if not shares or len(shares) < _ANSWERING * num_builders:
            return within
        share = sum(shares) / len(shares)
        self._num_quiet = self._num_quiet + 1 if share < _IDLE else 0
        if share > _BUSY:
            return min(within + max(1, within // 4), self._most)
        if self._num_quiet < _QUIET_PERIODS:
            return within
        self._num_quiet = 0
        return max(min(math.ceil(within * share / _WANTED), within), self._least)


class KeeperActor:
    """Keeps the builders of a named pool; Ray makes an actor of it."""

    def __init__(self, options: RayBuilders, limits: tuple[int, int] | None) -> None:
        """Go on with the builders that there are; with limits their number follows what they have to do."""
        self._options = options
        self._alone = threading.Lock()
        if limits is not None:
            threading.Thread(target=self._follow_load, args=(Load(*limits),), daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def resize(self, count: int) -> None:
        """Have so many builders, which ask of the cluster what the options say; others are ended."""
        import ray

        with self._alone:
            like_new = new_builder_name(self._options).rpartition(":")[0]
            names = builder_names(ray, self._options.pool or "")
            kept = [name for name in names if name.rpartition(":")[0] == like_new]
            if len(kept) > count:
                queued = {name: each["queued"] for name, each in statuses(ray, kept).items() if "queued" in each}
                kept.sort(key=lambda name: queued.get(name, -1), reverse=True)
            for name in set(names) - set(kept[:count]):
                with contextlib.suppress(ValueError):  # it is gone
                    ray.kill(ray.get_actor(name, namespace=NAMESPACE))
            for _ in range(count - len(kept)):
                name = new_builder_name(self._options)
                start_builder(ray, self._options, name=name, lifetime="detached", max_restarts=-1)

    def _follow_load(self, load: Load) -> None:
        import ray

        while True:
            time.sleep(_PERIOD_S)
            try:
                names = builder_names(ray, self._options.pool or "")
                busy_s = {name: each["busy_s"] for name, each in statuses(ray, names).items() if "busy_s" in each}
                wanted = load.saw(time.monotonic(), busy_s, len(names))
                if wanted != len(names):
                    self.resize(wanted)
            except Exception:
                logger.exception("the builders of a pool could not be counted; they are counted again")


def statuses(ray: Any, names: list[str]) -> dict[str, dict[str, Any]]:
    """Ask builders by their names; one that does not answer has only a word about it."""
    asked: dict[str, Any] = {}
    for name in names:
        with contextlib.suppress(ValueError):  # it is gone
            asked[name] = ray.get_actor(name, namespace=NAMESPACE).status.remote()
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S)
    found = {}
    for name, ref in asked.items():
        try:
            found[name] = ray.get(ref, timeout=0.1)
        except ray.exceptions.RayError as error:
            found[name] = {"away": type(error).__name__}
    return found


def start_keeper(options: RayBuilders) -> int | None:
    """Start a named pool, or give one that is there other options and another number of builders.

    Returns:
        How many builders it had; None: it is new.

    Raises:
        ConfigError: `count` is not between its limits, or there is no such cluster.
        WorkerError: The cluster does not start the pool's keeper, or does not end that which it had.
    """
    limits = replace(options, pool=None).limits
    ray, pool = connect(options), options.pool or ""
    before = len(builder_names(ray, pool)) if has_pool(ray, pool) else None
    _end_keeper(ray, pool)
    keeper = ray.remote(KeeperActor).options(
        name=keeper_name(pool), namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_restarts=-1
    )
    try:
        ray.get(keeper.remote(options, limits).resize.remote(options.count), timeout=_START_S)
    except ray.exceptions.GetTimeoutError as error:
        raise WorkerError(
            f"the cluster has not started the keeper of the pool '{pool}' within {_START_S:.0f} s, so it is not known "
            f"how many builders it has; look at the cluster (ray status) and do this again"
        ) from error
    return before


def end_pool(options: RayBuilders) -> None:
    """End a named pool.

    Raises:
        ConfigError: There is none.
        WorkerError: Its keeper does not end, and would start builders again.
    """
    ray, pool = connect(options), options.pool or ""
    if not has_pool(ray, pool):
        raise no_pool_error(pool)
    _end_keeper(ray, pool)
    for name in builder_names(ray, pool):
        with contextlib.suppress(ValueError):  # it is gone
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def _end_keeper(ray: Any, pool: str) -> None:
    """End the keeper, and wait until its name is free."""
    end = time.monotonic() + _GONE_S
    with contextlib.suppress(ConfigError):
        ray.kill(find_keeper(ray, pool))
        while time.monotonic() < end:
            find_keeper(ray, pool)
            time.sleep(0.05)
        raise WorkerError(
            f"the keeper of the pool '{pool}' has not ended within {_GONE_S:.0f} s, so the pool is as it was; look at "
            f"the cluster (ray status) and do this again"
        )
