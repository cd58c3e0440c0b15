"""Worker processes that outlive their own deaths.

Enters: a job that makes an iterator for (cursor, first, stride), and where to start. Leaves: its items in order, taken
from the workers in turn. A worker that dies or hangs is replaced by a new one that starts at the cursor behind the last
item handed out; since a plan is a pure function of its cursor, nothing is lost, repeated or reordered. What an item is,
and how to find the cursor behind it, is the caller's concern.

A sample that ends its worker would do so for ever. Workers note which sample they work on (see `watch.py`), deaths are
counted for each, and the worker behind the second one leaves the sample out; behind the third, if it was killed by a
signal that may have come from outside.

Not `torch.utils.data.DataLoader`: there one dead worker ends all of them, by an error that can be raised in the middle
of the trainer's own code.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import queue
import signal
import time
import traceback
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
    """One process and the queue of its finished items."""

    def __init__(
        self,
        context: BaseContext,
        job: Job,
        share: tuple[Any, int, int],
        prefetch: int,
        skipped: Mapping[SampleRef, str],
    ) -> None:
        self.items: Any = context.Queue(maxsize=prefetch)
        self.note = SampleNote(context)
        self._done = context.Event()
        returned: Any = context.SimpleQueue()
        parent = None if context.get_start_method() == "forkserver" else os.getpid()
        channels = (self.items, self._done, returned)
        arguments = (job, share, channels, parent, (self.note, dict(skipped)))
        self.process: Any = context.Process(  # type: ignore[attr-defined]
            target=_run, args=arguments, daemon=True, name="vlm-stream-worker"
        )
        self.process.start()
        self.blocks = BlockReader(self.process.pid, returned)

    def close(self) -> None:
        """End the process, if need be by force."""
        self._done.set()
        self.blocks.close()
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_JOIN_S)
            if self.process.is_alive():
                self.process.kill()
        self.process.join()
        self.items.cancel_join_thread()
        self.items.close()


class WorkerPool:
    """Items of a job, made by several processes, in order."""

    def __init__(self, job: Job, cursor: Any, options: WorkerOptions) -> None:
        """Start the workers: number w makes the items w, w + n, ... behind the cursor."""
        import torch.multiprocessing

        self._job = job
        self._options = options
        self._context: Any = torch.multiprocessing.get_context(options.start_method)
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
        try:
            return sum(worker.items.qsize() for worker in self._workers if worker is not None)
        except NotImplementedError:  # macOS cannot count a queue
            return 0

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
                worker.blocks.give_back()
                item = ForkingPickler.loads(worker.items.get(timeout=_POLL_S))
            except queue.Empty:
                waited = time.monotonic() - begin
                if worker.process.is_alive() and (self._options.hang_s is None or waited < self._options.hang_s):
                    continue
                self._replace(slot, cursor_behind(), f"has finished nothing for {waited:.0f} s")
                begin = time.monotonic()
            except (OSError, EOFError, RuntimeError) as error:  # mostly: it died while its tensors were on their way
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
    channels: tuple[Any, Any, Any],
    parent: int | None,
    watched: tuple[SampleNote, Mapping[SampleRef, str]],
) -> None:
    """Be a worker: put items until there are no more, then wait, since tensors in the queue live in this process."""
    import torch
    import torch.multiprocessing

    items, done, returned = channels
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    # By name, not by descriptor: a descriptor must be asked of the worker, and a hung one never answers.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    offer_blocks(returned)
    watch_samples(*watched)
    try:
        for item in job(*share):
            if not _put(items, item, parent):
                return
        _put(items, _End, parent)
    except BaseException as error:
        text = traceback.format_exc()
        _put(items, _Failure(error if _survives(error) else None, text), parent)
    while _lives(parent) and not done.wait(_POLL_S):
        pass
    items.cancel_join_thread()


def _put(items: Any, item: Any, parent: int | None) -> bool:
    """Put one item; give up when the parent is gone.

    It is pickled here: the queue's own thread drops what cannot be pickled, and the next item would take its place.
    """
    try:
        data = bytes(ForkingPickler.dumps(item))
    except Exception as error:  # a class may fail in any way when it is taken apart
        raise WorkerError(
            f"a batch cannot be sent by its worker process ({type(error).__name__}: {error}), so the run ends here; "
            f"its state is good. Let collate_fn return tensors, arrays, text and numbers, or set num_workers=0."
        ) from error
    while _lives(parent):
        try:
            items.put(data, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False


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
