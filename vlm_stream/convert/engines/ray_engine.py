"""The Ray engine: the tasks of a conversion on a cluster. Needs the extra `ray`.

Every node must be able to import this package and to reach input and target by the same paths or URLs. A task whose
worker or node dies is run again by Ray itself; a task leaves either a whole shard or nothing, so running it twice is
safe.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vlm_stream.errors import MissingExtraError, VlmStreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["RayEngine"]

T = TypeVar("T")
R = TypeVar("R")

_LOG = logging.getLogger(__name__)
_MAX_RETRIES: Final = 10


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
        call = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_call)
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
                f"finished is kept. Look at the cluster's workers, and go on with --resume."
            ) from error


def _call(function: Callable[[Any], Any], task: Any, folder: str) -> Any:
    """Run one task where the job was started, so that relative paths mean the same (where that folder exists)."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return function(task)
