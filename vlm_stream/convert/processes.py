"""Local processes that run tasks and may die: the parent's side first, then the child's.

A process shares with its parent one connection, and the number of the record in work: no queue and no lock, which a
killed process would hold for ever. Its death closes the connection, also in the middle of a result, because nobody else
holds the other end.

Processes are spawned, not forked: the parent may have threads of storage clients and tokenizers. The function is sent
to each process once, tasks one by one, so a function may carry a whole catalog of records. Answers are `(True, result)`
and `(False, error, trace)`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from vlm_stream.allocator import keep_freed_memory
from vlm_stream.errors import VlmStreamError, hide_secrets
from vlm_stream.lifetimes import die_with_parent, say_exit

NO_RECORD: Final = -1
_LOG = logging.getLogger(__name__)
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

    When a process dies, the others finish their tasks first; then its task is run again, alone.
    """
    packed = bytes(ForkingPickler.dumps(function))
    processes: list[_Process] = []
    lost: list[Any] = []
    try:
        while True:
            while not lost and (len(processes) < workers or not all(process.is_busy for process in processes)):
                try:
                    task = next(tasks)
                except StopIteration:
                    break
                free = next((process for process in processes if not process.is_busy), None)
                if free is None:
                    free = _Process(packed)
                    processes.append(free)
                free.give(task)
            busy: dict[Any, _Process] = {process.connection: process for process in processes if process.is_busy}
            if not busy:
                _end(processes)
                if not lost:
                    return
                _LOG.warning("a worker process died; what it worked on is run again, by itself")
                while lost:
                    yield _run_alone(packed, lost.pop())
            for connection in wait(list(busy)) if busy else ():
                try:
                    yield busy[connection].take()
                except DeadError:
                    processes.remove(busy[connection])
                    lost.append(busy[connection].task)
    finally:
        _end(processes)


def _end(processes: list[_Process]) -> None:
    """Close the connections, and wait until all have finished their tasks and ended: what is finished is kept."""
    for process in processes:
        process.connection.close()
    while processes:
        processes.pop().wait()


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
            _end([process])


class _Process:
    """One process, and the parent's end of its connection."""

    def __init__(self, packed: bytes, left_out: frozenset[int] = frozenset()) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self._note = context.RawArray("q", [NO_RECORD])
        self.task: Any = None
        self.is_busy = False
        self.connection, theirs = context.Pipe()
        with theirs:  # closed here: else the death of the process would not end the connection
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
        self.task, self.is_busy = task, True
        self._send(bytes(ForkingPickler.dumps(task)))

    def take(self) -> Any:
        """Return the result of the task in hand, or raise its error.

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
        self.is_busy = False
        if is_good:
            return answer[0]
        error, trace = answer
        if error is None:
            raise VlmStreamError(f"a worker process failed, so the job ends here: {trace}")
        raise error from TraceError(trace)

    def wait(self) -> None:
        if not self.is_busy:
            self._process.join(_JOIN_S)
            self._process.kill()
        self._process.join()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone, which `take` tells
            self.connection.send_bytes(data)


# --- the child ---

_note: Any = None
"""One number in memory that is shared with whoever started this process: the record that is worked on."""
_left_out: frozenset[int] = frozenset()


@contextlib.contextmanager
def working_on(record: int) -> Iterator[None]:
    """Note which record is worked on: it may end this process."""
    if _note is None:
        yield
        return
    _note[0] = record
    try:
        yield
    finally:
        _note[0] = NO_RECORD


def is_left_out(record: int) -> bool:
    """Tell whether a record has ended processes before, and must not be touched."""
    return record in _left_out


def serve(connection: Any, note: Any, left_out: frozenset[int], parent: int) -> None:
    """Run tasks until the parent closes the connection."""
    global _note, _left_out
    _note, _left_out = note, left_out
    die_with_parent(parent)
    keep_freed_memory()
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):  # the parent has closed it, or Ctrl-C
        _serve(connection)


def _serve(connection: Any) -> None:
    packed = connection.recv_bytes()
    function = None
    while True:
        data = connection.recv_bytes()
        try:
            function = function or pickle.loads(packed)  # noqa: S301 - our parent's bytes
            answer = ForkingPickler.dumps((True, function(pickle.loads(data))))  # noqa: S301 - likewise
        except Exception as error:
            answer = ForkingPickler.dumps((False, *_describe(error)))
        connection.send_bytes(answer)


def _describe(error: Exception) -> tuple[Exception | None, str]:
    """Return an error as it can be sent."""
    trace = hide_secrets("".join(traceback.format_exception(error)))
    try:
        survives = isinstance(pickle.loads(pickle.dumps(error)), type(error))  # noqa: S301 - our own bytes
    except Exception:  # a class may fail in any way when it is rebuilt
        survives = False
    return error if survives else None, trace
