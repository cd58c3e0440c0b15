"""Engines: run one function over many tasks, somewhere else.

Enters: a picklable function of one task, and tasks. Leaves: their results, in whatever order they finish. An engine
knows nothing of shards; a worker that dies costs the tasks it had in hand, which are run again.

Files: `local.py` (this machine's processes), `ray_engine.py` (a Ray cluster).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from vlm_stream.convert.engines.local import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vlm_stream.convert.options import ShardOptions

__all__ = ["Engine", "LocalEngine", "open_engine"]

T = TypeVar("T")
R = TypeVar("R")


class Engine(Protocol):
    """Runs tasks."""

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """Yield `function(task)` for every task, as they finish."""
        ...


def open_engine(options: ShardOptions) -> Engine:
    """Return the engine that the options name."""
    if options.engine == "ray":
        from vlm_stream.convert.engines.ray_engine import RayEngine

        return RayEngine(workers=options.workers, address=options.ray_address)
    return LocalEngine(workers=options.workers)
