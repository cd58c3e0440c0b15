"""Engines: run one function over many tasks, in processes of this machine or on a Ray cluster.

Enters: a picklable function of one task, and tasks. Leaves: their results, in the order in which they finish. An engine
knows nothing of shards. The task of a worker that dies is run again in a process of its own. A function may say which
record it works on (`working_on`): a record that ends its process repeatedly is left out.

With Ray (extra `ray`) every node must be able to import this package and to reach input and target by the same paths or
URLs. A task leaves either a whole shard or nothing, so running it twice is safe.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from vlm_stream.convert.processes import run_in_processes
from vlm_stream.errors import ConfigError, MissingExtraError, VlmStreamError
from vlm_stream.world import num_cores

T = TypeVar("T")
R = TypeVar("R")

_LOG = logging.getLogger(__name__)
_MAX_RETRIES: Final = 10
_START_SECONDS: Final = 1.5  # of a process that imports this package
_PROCESSOR_SECONDS: Final = 5.0
_WORTH: Final = 1.25  # how much sooner the end must come: starts cost the other cores as well


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
        if self.workers < 1:
            raise ConfigError(f"{self.workers} workers can do nothing; give at least 1, or leave their number out.")

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Generator[R, None, None]:
        """Yield `function(task)` for every task, as they finish."""
        if self.workers == 1:
            yield from map(function, tasks)
            return
        yield from run_in_processes(self.workers, function, iter(tasks))


@dataclass(frozen=True, slots=True)
class RayEngine:
    """Runs tasks on a Ray cluster, `workers` at a time."""

    workers: int = 1
    address: str | None = None
    """A running cluster; None: the one this process is connected to, or a new one on this machine."""

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Generator[R, None, None]:
        """Yield `function(task)` for every task, as they finish."""
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError("ray", "ray", "The engine 'ray'") from error
        started = not ray.is_initialized()
        if started:
            new = {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
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


Engine: TypeAlias = LocalEngine | RayEngine


def _call_in(function: Callable[[Any], Any], task: Any, folder: str) -> Any:
    """Run one task where the job was started, so that relative paths mean the same (where that folder exists)."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return function(task)
