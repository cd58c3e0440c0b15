"""The local engine: this process, or several of this machine.

Processes are spawned, not forked: the parent may hold threads of storage clients and of tokenizers. The function goes
to each process once, tasks one by one, so a function may carry a whole catalog of records.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vlm_stream.allocator import keep_freed_memory
from vlm_stream.errors import VlmStreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["LocalEngine"]

T = TypeVar("T")
R = TypeVar("R")

_LOG = logging.getLogger(__name__)
_MAX_LOSSES: Final = 3
_function: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """Runs tasks in `workers` processes; a single worker is this process itself."""

    workers: int = 1

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
                        f"what is finished is kept. Use fewer workers, and go on with --resume."
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
