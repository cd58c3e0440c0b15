"""A builder in a process of its own: the child's side of `processes.py`.

It listens on one connection. Messages to it: `("config", bytes, environment)` once, unless it was forked,
`("build", number, blueprint, skipped)`,
`("drop", number)`, each with the blocks that the parent is done with. Messages from it: `("ready",)`, `("done", number,
delivery, resident_bytes)`, `("failed", number or None, failure)`. A thread reads, so that bytes of the next batches are
fetched while one is built, and the parent never waits for room.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.allocator import keep_freed_memory, resident_bytes
from vlm_stream.blocks import BlockPool, offer_blocks
from vlm_stream.dispatch.confinement import confine
from vlm_stream.dispatch.pool import Failure, Noted
from vlm_stream.dispatch.watchdog import offer_stacks
from vlm_stream.errors import ConfigError, WorkerError, hide_secrets
from vlm_stream.lifetimes import die_with_parent

if TYPE_CHECKING:
    from vlm_stream.blueprint import SampleRef
    from vlm_stream.build import Builder

_IDLE: Final = -1


def serve(
    connection: Any, note: SampleNote, parent: int | None, config: Any = None, confined_bytes: int | None = None
) -> None:
    """Be a builder until the parent has gone.

    Args:
        connection: This end of it.
        note: Where samples are noted.
        parent: Its process id; None: a fork server stands between.
        config: What to build by; None: it comes as the first message.
        confined_bytes: What it may take beyond the memory that it begins with, and no connections; None: anything.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    offer_stacks()
    die_with_parent(parent)
    keep_freed_memory()
    try:
        _serve(_Link(connection), note, config, confined_bytes)
    except (EOFError, OSError):  # nobody is there to be told
        return


def _serve(link: _Link, note: SampleNote, config: Any, confined_bytes: int | None) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        builder: Builder = (config or _receive_config(link)).open(note)
        if confined_bytes is not None:
            confine(confined_bytes)
    except BaseException as error:
        link.send("failed", None, describe(error))
        link.wait()
        return
    link.send("ready")
    jobs: OrderedDict[int, tuple[Any, ...] | Exception] = OrderedDict()
    while True:
        _hear(link, builder, jobs)
        number, job = jobs.popitem(last=False)
        try:
            if isinstance(job, Exception):
                raise job
            message = link.pack("done", number, builder.finish(*job), resident_bytes())
        except BaseException as error:
            message = link.pack("failed", number, describe(error))
        del job
        link.send_packed(message)
        del message


def _receive_config(link: _Link) -> Any:
    """Return what to build by. The environment is that of the trainer now, not when its fork server started."""
    _, data, environment = link.next()
    os.environ.update(environment)
    try:
        return pickle.loads(data)  # noqa: S301 - our parent's bytes
    except Exception as error:
        raise ConfigError(
            f"a worker process cannot load what it needs to build batches ({type(error).__name__}: {error}); define "
            f"collate_fn and processor classes in a module that can be imported, or use start_method='fork' or "
            f"num_workers=0"
        ) from error


def _hear(link: _Link, builder: Builder, jobs: OrderedDict[int, tuple[Any, ...] | Exception]) -> None:
    """Take in what the parent said; wait only where there is nothing to do. Fetching begins at once.

    An error of fetching waits for its batch's turn, as all errors of a batch do.
    """
    while not jobs or link.has_more():
        kind, number, *rest = link.next()
        if kind == "build":
            blueprint, skipped = rest
            try:
                jobs[number] = (blueprint, builder.begin(blueprint), skipped)
            except Exception as error:
                jobs[number] = error
        elif isinstance(dropped := jobs.pop(number, None), tuple):
            dropped[1].cancel()


class SampleNote:
    """Which sample a process is working on, in numbers that outlive it: a decoder can end its process, or never return.

    They lie in memory that the process shares with its parent, without a lock. A note may be sent to a process that is
    started with it.
    """

    def __init__(self, context: Any) -> None:
        """Share four numbers: when the sample was begun, and its ref."""
        self._numbers = context.RawArray("q", [_IDLE, 0, 0, 0])

    def begin(self, ref: SampleRef) -> None:
        """Write down a sample; when it was begun comes last, so that nobody reads half of a ref."""
        self.end()
        self._numbers[1:4] = ref
        self._numbers[0] = time.monotonic_ns()

    def end(self) -> None:
        """Write down that no sample is worked on."""
        self._numbers[0] = _IDLE

    def read(self) -> Noted | None:
        """Return the sample that is, or was, worked on."""
        begun, source, shard, row = self._numbers[:]
        return None if begun == _IDLE else Noted((source, shard, row), (time.monotonic_ns() - begun) / 1e9)


class _Link:
    """The child's end of the connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._blocks: BlockPool = offer_blocks()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                can_read, returned, message = self._connection.recv()
                self._blocks.is_welcome = can_read
                self._blocks.take_back(returned)
                self._inbox.put(message)
        except (EOFError, OSError):
            pass
        finally:  # also where memory has ended: nobody would wait for a message that never comes
            self._inbox.put(None)

    def has_more(self) -> bool:
        return not self._inbox.empty()

    def next(self) -> tuple[Any, ...]:
        message = self._inbox.get()
        if message is None:
            raise EOFError
        return message

    def wait(self) -> None:
        while True:
            self.next()

    def send(self, *message: Any) -> None:
        self.send_packed(self.pack(*message))

    def pack(self, *message: Any) -> Any:
        try:
            return ForkingPickler.dumps(message)
        except Exception as error:  # a class may fail in any way when it is taken apart
            raise WorkerError(
                f"a batch cannot be sent by its worker process ({type(error).__name__}: {error}), so the run ends "
                f"here; its state is good. Let collate_fn return tensors, arrays, text and numbers, or set "
                f"num_workers=0."
            ) from error

    def send_packed(self, message: Any) -> None:
        self._connection.send_bytes(message)


def describe(error: BaseException) -> Failure:
    """Return an error as it can be sent."""
    text = hide_secrets("".join(traceback.format_exception(error)))
    try:
        survives = isinstance(pickle.loads(pickle.dumps(error)), type(error))  # noqa: S301 - our own bytes
    except Exception:  # a class may fail in any way when it is rebuilt
        survives = False
    return Failure(error if survives else None, text)
