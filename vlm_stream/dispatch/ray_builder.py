"""A builder as a Ray actor: the far side of `ray_pool.py`.

Enters: the config of each run that uses it, then blueprints. Leaves: parcels, which trainers read in place: from Ray's
object store, or from blocks of this process (`blocks.py`) where it builds for one trainer alone, and that is on this
machine. The event loop listens and begins to fetch; one thread builds. Several runs may use one builder, in turns by
their shares; each rank of a run counts as one here, and those with the same config have one processor. A builder keeps
nothing that matters: when it is lost, its blueprints are given to others.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from vlm_stream.allocator import keep_freed_memory, resident_bytes
from vlm_stream.blocks import BlockPool, find_realm, offer_blocks
from vlm_stream.dispatch.parcel import pack
from vlm_stream.dispatch.worker import describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.blueprint import Blueprint, SampleRef
    from vlm_stream.build import Builder

Job = TypeVar("Job")

_IDLE_S: Final = 1800.0
"""A run that has wanted nothing for so long may be dead, and is forgotten; a trainer that lives opens it again."""
_STUCK_S: Final = 10.0
"""A batch may take so long, whatever its trainer expects."""


class Place(NamedTuple):
    """Where a builder is."""

    node: str
    address: str
    pid: int
    realm: str | None = None
    """In which its process id counts."""


@dataclass(slots=True, eq=False)
class _Run:
    key: str
    """Of the config that it builds by."""
    used_at: float = field(default_factory=time.monotonic)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Job:
    builder: Builder
    blueprint: Blueprint
    reading: Any
    skipped: Mapping[SampleRef, str]
    future: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Queue(Generic[Job]):
    share: float
    spent_s: float = 0.0
    """Divided by its share."""
    jobs: OrderedDict[int, Job] = field(default_factory=OrderedDict)


class Shares(Generic[Job]):
    """Jobs that wait, by run: at a builder that several runs use each gets its time by its share.

    It has no clock and no threads.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _Queue[Job]] = {}
        self._spent_s = 0.0
        """Of the run whose job was taken last: what others have had while a run wanted nothing is not owed to it."""

    def __len__(self) -> int:
        return sum(len(queue.jobs) for queue in self._queues.values())

    def add(self, run: str, share: float) -> None:
        """Let a run have jobs, or give one that has them another share."""
        self._queues.setdefault(run, _Queue(share)).share = share

    def remove(self, run: str) -> list[Job]:
        queue = self._queues.pop(run, None)
        return [] if queue is None else list(queue.jobs.values())

    def put(self, run: str, ticket: int, job: Job) -> None:
        queue = self._queues[run]
        if not queue.jobs:
            queue.spent_s = max(queue.spent_s, self._spent_s)
        queue.jobs[ticket] = job

    def drop(self, run: str, ticket: int) -> Job | None:
        queue = self._queues.get(run)
        return None if queue is None else queue.jobs.pop(ticket, None)

    def take(self) -> tuple[str, Job]:
        """Return the next job, and whose it is: of the run that has had the least of its share."""
        waiting = ((queue.spent_s, run) for run, queue in self._queues.items() if queue.jobs)
        self._spent_s, run = min(waiting)
        return run, self._queues[run].jobs.popitem(last=False)[1]

    def spend(self, run: str, seconds: float) -> None:
        if run in self._queues:
            queue = self._queues[run]
            queue.spent_s += seconds / queue.share

    def waits(self, run: str) -> bool:
        return run in self._queues and bool(self._queues[run].jobs)


class RayBuilder:
    """Builds for one or more runs; Ray makes an actor of it."""

    def __init__(self) -> None:
        self._builders: dict[str, asyncio.Future[Builder]] = {}
        """By their configs: ranks of one run have one, as long as one of them is known."""
        self._runs: dict[str, _Run] = {}
        self._jobs: Shares[_Job] = Shares()
        self._current: tuple[str, float] | None = None
        """Whose batch is being built, and since when."""
        self._changed = threading.Condition()
        self._blocks: BlockPool | None = None
        """Of a builder of one run, whose trainer can read them."""
        self._begun_at = time.monotonic()
        self._busy_s = self._fetch_s = 0.0
        self._num_built = self._num_failed = self._num_helped = self._num_bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._work, name="vlm-stream-build", daemon=True).start()

    async def open(self, run: str, key: str, config: bytes, share: float) -> Place:
        """Get ready to build for a run; runs with one key have one config."""
        import ray

        self._loop = asyncio.get_running_loop()
        with self._changed:
            before = self._runs.get(run)
            self._runs[run] = _Run(key)
            self._jobs.add(run, share)
        if before is not None:
            before.is_over.set()
        self._forget()
        if key not in self._builders:
            self._builders[key] = asyncio.ensure_future(self._loop.run_in_executor(None, _open, config))
        try:
            await asyncio.shield(self._builders[key])
        except BaseException:
            self._builders.pop(key, None)
            await self.close(run)
            raise
        context = ray.get_runtime_context()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Place(context.get_node_id(), address, os.getpid(), find_realm())

    async def build(
        self,
        run: str,
        ticket: int,
        blueprint: Blueprint,
        skipped: Mapping[SampleRef, str],
        is_help: bool,
        returned: Sequence[tuple[int, int]] | None = None,
    ) -> Any:
        """Build a batch in its turn, perhaps one that another builder is late with.

        Calls may arrive in any order. So each has a ticket of its own, by which it is dropped, and no other. With the
        blocks that the trainer is done with, it says that it can read blocks.

        Returns:
            `("done", resident bytes, text, buffers)`, `("failed", failure)`, `("unknown",)` if it was not opened for
            the run, or None if the batch was dropped.
        """
        found = self._runs.get(run)
        if found is None or (opened := self._builders.get(found.key)) is None or not opened.done():
            return ("unknown",)
        builder = opened.result()
        self._num_helped += is_help
        if returned is not None:
            self._blocks = self._blocks or offer_blocks()
            self._blocks.is_welcome = True
            self._blocks.take_back(returned)
        try:
            reading = builder.begin(blueprint)
        except Exception as error:
            return "failed", describe(error)
        job = _Job(builder, blueprint, reading, skipped, asyncio.get_running_loop().create_future())
        with self._changed:
            found.used_at = time.monotonic()
            self._jobs.put(run, ticket, job)
            self._changed.notify()
        return await job.future

    async def drop(self, run: str, ticket: int) -> None:
        """Forget a batch that is not begun."""
        with self._changed:
            job = self._jobs.drop(run, ticket)
        if job is not None:
            job.reading.cancel()
            job.future.set_result(None)

    async def close(self, run: str) -> None:
        with self._changed:
            closed = self._runs.pop(run, None)
            gone = self._jobs.remove(run)
        if closed is not None:
            closed.is_over.set()
        for job in gone:
            job.reading.cancel()
            job.future.set_result(None)
        self._forget()

    async def end_if_stuck(self, run: str) -> None:
        """End this process, of which Ray starts another, if it is a batch of this run that it cannot finish.

        A run cannot see whose batch keeps a builder busy.
        """
        current = self._current
        if current is not None and current[0] == run and time.monotonic() - current[1] > _STUCK_S:
            os._exit(1)

    async def wait(self, run: str) -> None:
        """Return when a run is closed or forgotten; before that, whoever waits is told when this builder is lost."""
        found = self._runs.get(run)
        if found is not None:
            await found.is_over.wait()

    async def status(self) -> dict[str, Any]:
        """Return what it has done so far; it waited for bytes of samples."""
        import ray

        passed = max(time.monotonic() - self._begun_at, 1e-9)
        return {
            "node": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "pid": os.getpid(),
            "built": self._num_built,
            "failed": self._num_failed,
            "helped": self._num_helped,
            "queued": len(self._jobs),
            "runs": len(self._runs),
            "bytes": self._num_bytes,
            "busy": self._busy_s / passed,
            "busy_s": self._busy_s,
            "waited_s": self._fetch_s,
            "resident_bytes": resident_bytes(),
        }

    def _forget(self) -> None:
        """Forget runs that want nothing, then configs without runs; not what is being built."""
        oldest = time.monotonic() - _IDLE_S
        with self._changed:
            busy = None if self._current is None else self._current[0]
            for name, run in list(self._runs.items()):
                if run.used_at < oldest and name != busy and not self._jobs.waits(name):
                    self._runs.pop(name).is_over.set()
                    self._jobs.remove(name)
            keys = {run.key for run in self._runs.values()}
            unused = [key for key, opened in self._builders.items() if key not in keys and opened.done()]
            closing = [self._builders.pop(key) for key in unused] if busy in self._runs or busy is None else []
        for opened in closing:
            if opened.exception() is None:
                opened.result().close()

    def _work(self) -> None:
        import torch

        torch.set_num_threads(1)
        keep_freed_memory()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._jobs))
                run, job = self._jobs.take()
                self._current = run, time.monotonic()
            answer = self._build(job)
            with self._changed:
                seconds = time.monotonic() - self._current[1]
                self._current = None
                self._jobs.spend(run, seconds)
            self._busy_s += seconds
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._answer, job.future, answer)
            del job, answer

    def _answer(self, future: asyncio.Future[Any], answer: Any) -> None:
        if not future.done():
            future.set_result(answer)
        self._forget()

    def _build(self, job: _Job) -> tuple[Any, ...]:
        try:
            delivery = job.builder.finish(job.blueprint, job.reading, job.skipped)
            text, buffers = pack(delivery, self._blocks)
        except BaseException as error:
            self._num_failed += 1
            return "failed", describe(error)
        self._num_built += 1
        self._num_bytes += delivery.num_bytes
        self._fetch_s += delivery.seconds["fetch"]
        return "done", resident_bytes(), text, buffers


def _open(config: bytes) -> Builder:
    builder: Builder = pickle.loads(config).open(None)  # noqa: S301 - the trainer's bytes
    return builder
