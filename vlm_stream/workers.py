"""Worker processes; those that die or hang are replaced.

Enters: a job that makes an iterator for (cursor, first, stride), and where to start. Leaves: its items in order, taken
from the workers in turn. A worker that dies or hangs is replaced by a new one that starts at the cursor behind the last
item handed out; since a plan is a pure function of its cursor, nothing is lost, repeated or reordered. What an item is,
and how to find the cursor behind it, is the caller's concern.

A sample that ends its worker would do so for ever. Workers note which sample they work on (see `watch.py`), deaths are
counted for each, and the worker behind the second one leaves the sample out; behind the third, if it was killed by a
signal that may have come from outside.

A worker shares one duplex connection with its parent, its blocks of memory (see `blocks.py`), and nothing else: no
queue, lock or event, which a killed process would keep for ever. Items come through the connection, and credits for
more items and blocks that are free go back. The end of the connection is the sign of a death, on both sides. A thread
for each worker reads, so that a message of which half has come blocks nobody.

Not `torch.utils.data.DataLoader`: there one dead worker ends all of them, by an error that can be raised in the middle
of the trainer's own code.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
import weakref
from collections import Counter
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, Protocol

from vlm_stream.blocks import BlockReader, offer_blocks
from vlm_stream.errors import VlmStreamError, WorkerError
from vlm_stream.watch import SampleNote, watch_samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.context import BaseContext

    from vlm_stream.watch import Noted, SampleRef

__all__ = ["Job", "WorkerOptions", "WorkerPool"]

logger = logging.getLogger(__name__)

_POLL_S: Final = 1.0
_JOIN_S: Final = 5.0
_OWN_DEATHS: Final = 2
_FOREIGN_DEATHS: Final = 3
_FOREIGN_SIGNALS: Final = frozenset((signal.SIGKILL, signal.SIGTERM))
"""Sent by the system or by people, who do not mean the sample; but memory that a sample takes is a cause, too."""


class Job(Protocol):
    """What a worker does."""

    def __call__(self, cursor: Any, first: int, stride: int) -> Iterator[Any]:
        """Yield the items number `first`, `first + stride`, ... behind the cursor."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How workers run."""

    num_workers: int
    prefetch: int = 2
    """Finished items that each worker keeps ready."""
    hang_s: float | None = None
    """A worker that has finished nothing for so long while its item is waited for is replaced; None: never."""
    max_restarts: int = 10
    """Replacements over the life of the pool, after which the run ends; those for samples that were then left out do
    not count."""
    start_method: str | None = None
    """`fork`, `spawn` or `forkserver`; None: the platform's default."""


class _End:
    """Sent by a worker that has no more items."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error of a worker, with its traceback as text."""

    error: BaseException | None
    text: str


class _Worker:
    """One process, and its finished items."""

    def __init__(
        self,
        context: BaseContext,
        job: Job,
        share: tuple[Any, int, int],
        prefetch: int,
        skipped: Mapping[SampleRef, str],
    ) -> None:
        self.items: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Finished ones, pickled; None: the connection has ended."""
        self.note = SampleNote(context)
        self._connection, theirs = context.Pipe()
        _connections.add(self._connection)
        parent = None if context.get_start_method() == "forkserver" else os.getpid()
        arguments = (job, share, theirs, parent, (self.note, dict(skipped)))
        self.process: Any = context.Process(  # type: ignore[attr-defined]
            target=_run, args=arguments, daemon=True, name="vlm-stream-worker"
        )
        self.process.start()
        theirs.close()
        self.blocks = BlockReader(self.process.pid)
        self._reading = threading.Thread(target=_read, args=(self._connection, self.items), daemon=True)
        self._reading.start()
        self._tell(prefetch)

    def take(self, timeout_s: float) -> Any:
        """Return the next item.

        Raises:
            queue.Empty: None came in that time.
            EOFError: The worker is gone.
        """
        data = self.items.get(timeout=timeout_s)
        if data is None:
            raise EOFError
        item = ForkingPickler.loads(data)
        self._tell(1)
        return item

    def close(self) -> None:
        """End the process, if need be by force."""
        self.blocks.close()
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_JOIN_S)
            if self.process.is_alive():
                self.process.kill()
        self.process.join()
        self._reading.join(_JOIN_S)
        self._connection.close()

    def _tell(self, num_items: int) -> None:
        """Let the worker make so many items more, and fill blocks again that nobody looks at."""
        with contextlib.suppress(OSError):  # it is gone, which its items will tell
            self._connection.send((num_items, self.blocks.can_read, self.blocks.to_return()))


_connections: weakref.WeakSet[Any] = weakref.WeakSet()
"""The parent's ends. A worker that is forked closes its copies, or it would keep the others' connections open."""


def _read(connection: Any, items: queue.SimpleQueue[bytes | None]) -> None:
    """Read whatever a worker sends until its end of the connection is closed."""
    with contextlib.suppress(OSError, EOFError):
        while True:
            items.put(connection.recv_bytes())
    items.put(None)


class WorkerPool:
    """Items of a job, made by several processes, in order."""

    def __init__(self, job: Job, cursor: Any, options: WorkerOptions) -> None:
        """Start the workers: number w makes the items w, w + n, ... behind the cursor."""
        self._job = job
        self._options = options
        self._context: Any = multiprocessing.get_context(options.start_method)
        self.num_restarts = 0
        self._deaths = _Deaths()
        self._workers: list[_Worker | None] = []
        for number in range(options.num_workers):
            self._workers.append(self._start(cursor, number))

    def items(self, cursor_behind: Any) -> Iterator[Any]:
        """Yield the items; `cursor_behind()` returns the cursor behind the last item that was yielded."""
        try:
            for number in itertools.count():
                item = self._next(number % len(self._workers), cursor_behind)
                if item is _End:  # items are numbered without gaps: there is none behind it either
                    return
                yield item
                del item  # a worker that is forked to replace another would keep its memory
        finally:
            self.close()

    def close(self) -> None:
        """End all workers."""
        for slot in range(len(self._workers)):
            self._stop(slot)

    def pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return [worker.process.pid for worker in self._workers if worker is not None]

    def num_ready(self) -> int:
        """Return how many finished items wait to be taken."""
        return sum(worker.items.qsize() for worker in self._workers if worker is not None)

    def _start(self, cursor: Any, first: int) -> _Worker:
        share = (cursor, first, self._options.num_workers)
        return _Worker(self._context, self._job, share, self._options.prefetch, self._deaths.skipped)

    def _stop(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            worker.close()

    def _next(self, slot: int, cursor_behind: Any) -> Any:
        begin = time.monotonic()
        while True:
            worker = self._workers[slot]
            assert worker is not None  # noqa: S101 - a closed pool has no more turns
            try:
                item = worker.take(_POLL_S)
            except queue.Empty:
                waited = time.monotonic() - begin
                if self._options.hang_s is None or waited < self._options.hang_s:
                    continue
                self._replace(slot, cursor_behind(), f"has finished nothing for {waited:.0f} s")
                begin = time.monotonic()
            except (OSError, EOFError, RuntimeError) as error:  # it died, maybe with blocks that were to be opened
                worker.process.join(_JOIN_S)
                self._replace(slot, cursor_behind(), f"sent a batch that could not be read ({error})")
                begin = time.monotonic()
            else:
                if isinstance(item, _Failure):
                    _raise(item)
                return item

    def _replace(self, slot: int, cursor: Any, fault: str) -> None:
        worker = self._workers[slot]
        assert worker is not None  # noqa: S101 - only a running worker can fail
        pid, alive = worker.process.pid, worker.process.is_alive()
        noted = worker.note.read()  # before it is ended: what it works on after its time is not the cause
        self._stop(slot)
        what = fault if alive else f"died ({_cause(worker.process.exitcode)})"
        if noted is not None:
            what += " while it worked on row {2} of shard {1} of source {0}".format(*noted.ref)
        self.num_restarts += 1
        left_out = noted is not None and self._blame(noted, None if alive else worker.process.exitcode)
        num_counted = self.num_restarts - self._deaths.num_settled
        if num_counted > self._options.max_restarts:
            raise WorkerError(
                f"worker {slot} (pid {pid}) {what}, after {self._options.max_restarts} others had failed, so the run "
                f"ends here; its state is good. Look for what kills workers (memory, a broken decoder: 'dmesg' and the "
                f"ledger tell), lower num_workers or prefetch, or raise max_restarts."
            )
        logger.warning(
            "worker %d (pid %d) %s; a new one goes on behind the last batch%s (restart %d of %d)",
            slot,
            pid,
            what,
            ", without that sample" if left_out else "",
            num_counted,
            self._options.max_restarts,
        )
        # It is this slot's turn, so the item behind the cursor is the new worker's first.
        self._workers[slot] = self._start(cursor, 0)

    def _blame(self, noted: Noted, exit_code: int | None) -> bool:
        """Count a lost worker for the sample that it worked on; tell whether that is left out now.

        A worker that took too long (it has no exit code) may have made many samples in its time: only one that took
        most of it is to blame.
        """
        hang_s = self._options.hang_s
        if exit_code is None and (hang_s is None or noted.seconds < hang_s / 2):
            return False
        return self._deaths.add(noted.ref, exit_code)


class _Deaths:
    """How many workers each sample has cost, and which samples are left out from now on."""

    def __init__(self) -> None:
        self._counts: Counter[SampleRef] = Counter()
        self.skipped: dict[SampleRef, str] = {}
        """What the ledger says of each."""
        self.num_settled = 0
        """Deaths that cannot come again, since their samples are left out."""

    def add(self, ref: SampleRef, exit_code: int | None) -> bool:
        """Count one; tell whether the sample is left out now. Without an exit code the worker had hung."""
        if ref in self.skipped:  # by a worker that was started before; it counts as a restart, so that this has an end
            return True
        self._counts[ref] += 1
        num_deaths = self._counts[ref]
        may_be_foreign = exit_code is not None and -exit_code in _FOREIGN_SIGNALS
        if num_deaths < (_FOREIGN_DEATHS if may_be_foreign else _OWN_DEATHS):
            return False
        how = "hung" if exit_code is None else f"died ({_cause(exit_code)})"
        self.skipped[ref] = (
            f"{num_deaths} workers were lost while they worked on it (the last one {how}), so it is left out. Decode "
            f"it by itself to see why, and leave it out of the data or write its media anew."
        )
        self.num_settled += num_deaths
        return True


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:  # of the real-time signals two have names
            name = f"signal {-exit_code}"
        return f"{name}, often the out-of-memory killer" if name == "SIGKILL" else name
    return f"exit code {exit_code}"


def _raise(failure: _Failure) -> None:
    if failure.error is None:
        raise WorkerError(
            f"a worker failed, so the run ends here; its state is good. The worker's traceback:\n{failure.text}"
        )
    if not isinstance(failure.error, VlmStreamError):
        failure.error.add_note(f"in a worker process:\n{failure.text}")
    raise failure.error


def _run(
    job: Job,
    share: tuple[Any, int, int],
    connection: Any,
    parent: int | None,
    watched: tuple[SampleNote, Mapping[SampleRef, str]],
) -> None:
    """Be a worker: send items until there are no more, then wait, since their blocks live in this process."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in list(_connections):
        other.close()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    outbox = _Outbox(connection)
    watch_samples(*watched)
    try:
        try:
            for item in job(*share):
                outbox.put(item)
            outbox.put(_End)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            if not outbox.is_open():
                return
            outbox.put(_failure(error))
        except BaseException as error:
            outbox.put(_failure(error))
        outbox.wait()
    except (EOFError, OSError):  # nobody is there to be told
        return


class _Outbox:
    """A worker's side of its connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._num_wanted = 0
        self._blocks = offer_blocks(self._pull)

    def put(self, item: Any) -> None:
        """Send one item once the parent wants one."""
        try:
            data = ForkingPickler.dumps(item)
        except Exception as error:  # a class may fail in any way when it is taken apart
            raise WorkerError(
                f"a batch cannot be sent by its worker process ({type(error).__name__}: {error}), so the run ends "
                f"here; its state is good. Let collate_fn return tensors, arrays, text and numbers, or set "
                f"num_workers=0."
            ) from error
        while not self._num_wanted:
            self._hear()
        self._num_wanted -= 1
        self._connection.send_bytes(data)

    def wait(self) -> None:
        """Listen until the parent has gone."""
        while True:
            self._hear()

    def is_open(self) -> bool:
        """Tell whether the parent is still there."""
        try:
            self._pull()
        except (EOFError, OSError):
            return False
        return True

    def _pull(self) -> None:
        while self._connection.poll():
            self._hear()

    def _hear(self) -> None:
        num_items, self._blocks.is_welcome, returned = self._connection.recv()
        self._num_wanted += num_items
        self._blocks.take_back(returned)


def _failure(error: BaseException) -> _Failure:
    return _Failure(error if _survives(error) else None, "".join(traceback.format_exception(error)))


def _end_with(parent: int | None) -> None:
    """End this process when its parent has gone, whatever it is waiting for."""
    while _lives(parent):
        time.sleep(_POLL_S)
    os._exit(1)


def _lives(parent: int | None) -> bool:
    """Tell whether the process that takes the items is there; None: a fork server stands between the two."""
    if parent is not None:
        return os.getppid() == parent
    process = multiprocessing.parent_process()
    return process is not None and process.is_alive()


def _survives(error: BaseException) -> bool:
    """Tell whether an error comes out of pickling as it went in."""
    import pickle

    try:
        return isinstance(pickle.loads(pickle.dumps(error)), type(error))  # noqa: S301 - our own bytes
    except Exception:  # a class may fail in any way when it is rebuilt
        return False
