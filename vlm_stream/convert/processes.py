"""Processes of this machine that run tasks, and may die.

A process shares one connection with its parent, and the number of the record that it works on: no queue and no lock,
which a killed process would keep for ever. The end of the connection is the sign of its death, also in the middle of a
result, because nobody but the process holds the other end.

Processes are spawned, not forked: the parent may hold threads of storage clients and of tokenizers. The function goes
to each of them once, tasks one by one, so a function may carry a whole catalog of records.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
from collections import Counter, deque
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.convert.worker import NO_RECORD, serve
from vlm_stream.errors import VlmStreamError
from vlm_stream.lifetimes import say_exit

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOG = logging.getLogger(__name__)
_AHEAD: Final = 2  # one in hand and one waiting: no process is idle
_JOIN_S: Final = 5.0
_MAX_LOSSES: Final = 3
_MAX_LOSSES_ALONE: Final = 2
"""After so many processes that worked on nothing else it is left out."""


class DeadError(Exception):
    """A process has ended before it was done."""


class TraceError(Exception):
    """Where a process was when its task failed: the cause of the error that is raised here."""


def run_in_processes(workers: int, function: Any, tasks: Iterator[Any]) -> Iterator[Any]:
    """Yield `function(task)` for every task, as they finish.

    The task that a process worked on when it died is run again, alone.
    """
    packed = bytes(ForkingPickler.dumps(function))
    waiting: deque[Any] = deque()
    while True:
        lost: list[Any] = []
        yield from _run_together(workers, packed, tasks, waiting, lost)
        if not lost:
            return
        _LOG.warning("a worker process died; what it worked on is run again, by itself")
        for task in lost:
            yield _run_alone(packed, task)


def _run_together(
    workers: int, packed: bytes, tasks: Iterator[Any], waiting: deque[Any], lost: list[Any]
) -> Iterator[Any]:
    """Run tasks until all are done or a process dies; the others then finish what they have in hand.

    Args:
        workers: How many processes.
        packed: The function.
        tasks: Where tasks come from.
        waiting: Tasks that were taken and not begun; they come first, and others are added.
        lost: Is given tasks that were begun by processes that died.
    """
    processes: list[_Process] = []
    try:
        while True:
            while not lost and min(_loads(processes, workers)) < _AHEAD:
                try:
                    task = waiting.popleft() if waiting else next(tasks)
                except StopIteration:
                    break
                if len(processes) < workers:
                    processes.append(_Process(packed))
                min(processes, key=lambda process: len(process.in_hand)).give(task)
            busy: dict[Any, _Process] = {process.connection: process for process in processes if process.in_hand}
            if not busy:
                return
            for connection in wait(list(busy)):
                process = busy[connection]
                try:
                    yield process.take()
                except DeadError:
                    processes.remove(process)
                    lost.append(process.in_hand.popleft())
                    waiting.extend(process.in_hand)
    finally:
        for process in processes:
            process.connection.close()
        for process in processes:
            process.wait()


def _loads(processes: list[_Process], workers: int) -> list[int]:
    """Return how many tasks each process has in hand, with those that are not started yet."""
    return [len(process.in_hand) for process in processes] + [0] * (workers - len(processes))


def _run_alone(packed: bytes, task: Any) -> Any:
    """Run a task in a process of its own, again if that dies, and without the records that end it."""
    losses: Counter[int] = Counter()
    while True:
        left_out = frozenset(record for record in losses if record != NO_RECORD and losses[record] >= _MAX_LOSSES_ALONE)
        process = _Process(packed, left_out)
        try:
            process.give(task)
            return process.take()
        except DeadError as error:
            record = process.record
            losses[record] += 1
            if losses[NO_RECORD] > _MAX_LOSSES:
                raise VlmStreamError(
                    f"worker processes died {_MAX_LOSSES + 1} times in a row ({error}), most often because memory ran "
                    f"out; what is finished is kept. Use fewer workers, and run the same again to go on."
                ) from error
            if record != NO_RECORD and losses[record] == _MAX_LOSSES_ALONE:
                _LOG.warning("record %d ended every process that worked on it, so it is left out", record)
        finally:
            process.connection.close()
            process.wait()


class _Process:
    """One process, and the parent's end of its connection."""

    def __init__(self, packed: bytes, left_out: frozenset[int] = frozenset()) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self._note = context.RawArray("q", [NO_RECORD])
        self.in_hand: deque[Any] = deque()
        """Tasks in the order in which they are worked on."""
        self.connection, theirs = context.Pipe()
        with theirs:  # closed here: else nobody would see the process's end of it go
            arguments = (theirs, self._note, left_out, os.getpid())
            self._process = context.Process(target=serve, args=arguments, daemon=True, name="vlm-stream-convert")
            self._process.start()
        self._send(packed)

    @property
    def record(self) -> int:
        """The record that is, or was, worked on."""
        number: int = self._note[0]
        return number

    def give(self, task: Any) -> None:
        self.in_hand.append(task)
        self._send(bytes(ForkingPickler.dumps(task)))

    def take(self) -> Any:
        """Return the result of the first task in hand, or raise its error.

        Raises:
            DeadError: The process has died over it.
        """
        try:
            is_good, *answer = pickle.loads(self.connection.recv_bytes())  # noqa: S301 - our own process's bytes
        except (EOFError, OSError):
            self.connection.close()
            self._process.join(_JOIN_S)
            self._process.kill()  # in case it has closed its end alone
            self._process.join()
            raise DeadError(say_exit(self._process.exitcode)) from None
        self.in_hand.popleft()
        if is_good:
            return answer[0]
        error, trace = answer
        if error is None:
            raise VlmStreamError(f"a worker process failed, so the job ends here: {trace}")
        raise error from TraceError(trace)

    def wait(self) -> None:
        """Wait until the process has ended, and with it what it has in hand: what is finished is kept."""
        if not self.in_hand:
            self._process.join(_JOIN_S)
            self._process.kill()
        self._process.join()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone, which `take` tells
            self.connection.send_bytes(data)
