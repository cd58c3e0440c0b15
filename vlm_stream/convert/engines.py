"""Engines: run one function over many tasks, in processes of this machine or on a Ray cluster.

Enters: a picklable function of one task, and tasks. Leaves: their results, in whatever order they finish. An engine
knows nothing of shards; a worker that dies costs the tasks it had in hand, which are run again.

Local processes are spawned, not forked: the parent may hold threads of storage clients and of tokenizers. The function
goes to each process once, tasks one by one, so a function may carry a whole catalog of records.

With Ray (extra `ray`) every node must be able to import this package and to reach input and target by the same paths or
URLs. A task leaves either a whole shard or nothing, so running it twice is safe.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from vlm_stream.allocator import keep_freed_memory
from vlm_stream.errors import ConfigError, MissingExtraError, VlmStreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Engine", "LocalEngine", "RayEngine", "choose_workers", "num_cores"]

T = TypeVar("T")
R = TypeVar("R")

_LOG = logging.getLogger(__name__)
_MAX_RETRIES: Final = 10
_MAX_LOSSES: Final = 3
_START_SECONDS: Final = 1.5
"""Of a process that imports this package."""
_PROCESSOR_SECONDS: Final = 5.0
_WORTH: Final = 1.25
"""How much sooner the end must come: starts cost the other cores as well."""
_function: Callable[[Any], Any] | None = None


class Engine(Protocol):
    """Runs tasks."""

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """Yield `function(task)` for every task, as they finish."""
        ...


def num_cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_workers(seconds: float, num_tasks: int, *, with_processor: bool = False) -> int:
    """Return how many processes end soonest: one needs no start, several share the work.

    Args:
        seconds: What all tasks take in one process.
        num_tasks: Tasks that could run side by side.
        with_processor: Each process imports transformers and loads a processor.

    >>> choose_workers(1.0, 100)
    1
    """
    most = max(min(num_cores(), num_tasks), 1)
    start = _START_SECONDS + (_PROCESSOR_SECONDS if with_processor else 0.0)
    return most if _WORTH * (start + seconds / most) < seconds else 1


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """Runs tasks in `workers` processes; a single worker is this process itself."""

    workers: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no number of processes."""
        if self.workers < 1:
            raise ConfigError(f"{self.workers} workers can do nothing; give at least 1, or leave their number out.")

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """Yield `function(task)` for every task, as they finish.

        Raises:
            VlmStreamError: Processes died again and again without a single task finished in between.
        """
        if self.workers == 1:
            yield from map(function, tasks)
            return
        source = iter(tasks)
        again: deque[T] = deque()
        num_losses = 0
        while True:
            running: dict[Future[R], T] = {}
            try:
                for result in self._run_pool(function, source, again, running):
                    num_losses = 0
                    yield result
                return
            except BrokenProcessPool as error:
                num_losses += 1
                again.extend(running.values())
                if num_losses > _MAX_LOSSES:
                    raise VlmStreamError(
                        f"worker processes died {num_losses} times in a row, most often because memory ran out; "
                        f"what is finished is kept. Use fewer workers, and run the same again to go on."
                    ) from error
                _LOG.warning("a worker process died; its %d tasks are run again", len(running))

    def _run_pool(
        self, function: Callable[[T], R], source: Iterator[T], again: deque[T], running: dict[Future[R], T]
    ) -> Iterator[R]:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_install, initargs=(function,))
        try:
            while True:
                while len(running) < 2 * self.workers:  # one in hand and one waiting: no worker is idle
                    try:
                        task = again.popleft() if again else next(source)
                    except StopIteration:
                        break
                    try:
                        running[pool.submit(_call, task)] = task
                    except BrokenProcessPool:
                        again.append(task)
                        raise
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    result = future.result()
                    del running[future]
                    yield result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _install(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    keep_freed_memory()


def _call(task: Any) -> Any:
    assert _function is not None  # noqa: S101 (the pool's initializer has run)
    return _function(task)


@dataclass(frozen=True, slots=True)
class RayEngine:
    """Runs tasks on a Ray cluster, `workers` at a time."""

    workers: int = 1
    address: str | None = None
    """A running cluster; None: the one this process is connected to, or a new one on this machine."""

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """Yield `function(task)` for every task, as they finish."""
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError("ray", "ray", "The engine 'ray'") from error
        started = not ray.is_initialized()
        if started:
            new = {"num_cpus": self.workers, "include_dashboard": False}
            cluster: dict[str, Any] = {"address": self.address} if self.address else new
            ray.init(**cluster, log_to_driver=False, logging_level=logging.WARNING)
        try:
            yield from self._run(ray, function, iter(tasks))
        finally:
            if started:
                ray.shutdown()

    def _run(self, ray: Any, function: Callable[[T], R], source: Iterator[T]) -> Iterator[R]:
        call = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_call_in)
        shared = ray.put(function)  # once for the cluster: it may carry a catalog of records
        folder = str(Path.cwd())
        running: dict[Any, T] = {}
        try:
            while True:
                while len(running) < 2 * self.workers:
                    try:
                        task = next(source)
                    except StopIteration:
                        break
                    running[call.remote(shared, task, folder)] = task
                if not running:
                    return
                for reference in ray.wait(list(running), num_returns=1)[0]:
                    yield self._result(ray, reference)
                    del running[reference]
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _result(self, ray: Any, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, VlmStreamError) else error) from error
        except ray.exceptions.RayError as error:
            raise VlmStreamError(
                f"a task was lost {_MAX_RETRIES + 1} times on the Ray cluster ({type(error).__name__}); what is "
                f"finished is kept. Look at the cluster's workers, and run the same again to go on."
            ) from error


def _call_in(function: Callable[[Any], Any], task: Any, folder: str) -> Any:
    """Run one task where the job was started, so that relative paths mean the same (where that folder exists)."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return function(task)
