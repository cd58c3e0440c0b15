"""Builders in processes of this machine.

A process shares one duplex connection with its parent, its blocks of memory (`blocks.py`), a note of its sample,
and nothing else: no queue, lock or event, which a killed process would keep for ever. The end of the
connection is the sign of a death, on both sides. Two threads for each process read and write, so that half a message,
or a process that does not listen, blocks nobody.

Processes start by forkserver: they inherit no threads, locks or CUDA state of the trainer. The main module is imported
in them only if the config needs it, so scripts need no `if __name__ == "__main__"`.

Not `torch.utils.data.DataLoader`: there one dead worker ends all of them, by an error that can be raised in the middle
of the trainer's own code.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import queue
import signal
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.blocks import BlockReader
from vlm_stream.dispatch.pool import Finished, Joined, Lost
from vlm_stream.dispatch.worker import SampleNote, serve
from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vlm_stream.blueprint import Blueprint, SampleRef
    from vlm_stream.build import BuildConfig
    from vlm_stream.dispatch.pool import Listener, Noted

__all__ = ["ProcessPool", "say_exit"]

_JOIN_S: Final = 5.0

_connections: weakref.WeakSet[Any] = weakref.WeakSet()
"""The parent's ends. A process that is forked closes its copies, or it would keep the others' connections open."""


class ProcessPool:
    """Builders that are processes."""

    def __init__(self, config: BuildConfig, listener: Listener, *, start_method: str | None = None) -> None:
        """Prepare; `listener` is called from threads of the pool.

        Raises:
            ConfigError: The config cannot be sent to another process.
        """
        self._context: Any = multiprocessing.get_context(start_method or "forkserver")
        # What is forked inherits the config, which then may hold what cannot be pickled.
        self._config = config if self._context.get_start_method() == "fork" else _pickled(config)
        self._listener = listener
        self._workers: dict[int, _Worker] = {}
        self._numbers = itertools.count()
        self._is_closed = False
        # One thread: the first start waits for the fork server, which imports torch, and the caller need not.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="vlm-stream-start")
        if self._context.get_start_method() == "forkserver":
            _preload([*config.modules(), serve.__module__])

    def grow(self) -> int:
        """Start one more builder."""
        number = next(self._numbers)
        self._starter.submit(self._start, number)
        return number

    def give(self, builder: int, number: int, blueprint: Blueprint, skipped: Mapping[SampleRef, str]) -> None:
        """Let a builder build a batch."""
        self._tell(builder, "build", number, blueprint, skipped)

    def drop(self, builder: int, number: int) -> None:
        """Let a builder forget a batch that it has not begun."""
        self._tell(builder, "drop", number)

    def stop(self, builder: int, why: str = "") -> None:
        """End a builder, by force where it hangs."""
        worker = self._workers.get(builder)
        if worker is not None:
            worker.end(why)

    def pids(self) -> list[int]:
        """Return the process ids."""
        return [worker.process.pid for worker in list(self._workers.values()) if worker.process.is_alive()]

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        self._starter.shutdown(wait=True, cancel_futures=True)
        workers = list(self._workers.values())
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.wait()
        self._workers.clear()

    def _tell(self, builder: int, *message: Any) -> None:
        worker = self._workers.get(builder)
        if worker is not None:
            worker.outbox.put(message)

    def _start(self, number: int) -> None:
        if self._is_closed:
            return
        try:
            self._workers[number] = _Worker(self._context, number, self._config, self._report)
        except Exception as error:
            self._listener(Lost(number, f"could not be started ({type(error).__name__}: {error})", 1, None))

    def _report(self, event: Any) -> None:
        if isinstance(event, Lost):
            self._workers.pop(event.builder, None)
        if not self._is_closed:
            self._listener(event)


class _Worker:
    """One process, and the parent's end of its connection."""

    def __init__(self, context: Any, number: int, config: bytes | BuildConfig, report: Any) -> None:
        self._number = number
        self._report = report
        self._why = ""
        self._noted: Noted | None = None
        self._note = SampleNote(context)
        self._connection, theirs = context.Pipe()
        _connections.add(self._connection)
        self.outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        parent = None if context.get_start_method() == "forkserver" else os.getpid()
        arguments = [theirs, self._note, parent]
        if isinstance(config, bytes):
            self.outbox.put(("config", config, dict(os.environ)))
            needs_main = b"__main__" in config
        else:
            arguments.append(config)
            needs_main = True
        target = serve if isinstance(config, bytes) else _serve_forked
        self.process: Any = context.Process(target=target, args=arguments, daemon=True, name="vlm-stream-worker")
        with contextlib.nullcontext() if needs_main else _without_main():
            self.process.start()
        theirs.close()
        self._blocks = BlockReader(self.process.pid)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def end(self, why: str = "") -> None:
        """End the process; with a reason, as one that hangs."""
        if why:
            self._noted = self._note.read()  # before it is ended: what it works on after its time is not the cause
            self._why = why
        self.process.kill()  # a stopped process would keep SIGTERM waiting
        self.outbox.put(None)

    def wait(self) -> None:
        """Wait until the process and the threads have ended."""
        self.process.join()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is gone, which the reading thread tells
            while (message := self.outbox.get()) is not None:
                self._connection.send_bytes(
                    ForkingPickler.dumps((self._blocks.can_read, self._blocks.to_return(), message))
                )

    def _read(self) -> None:
        fault = "closed its connection"
        try:
            while True:
                self._hear(self._connection.recv_bytes())
        except (OSError, EOFError):
            pass
        except Exception as error:  # it died with blocks that were to be opened
            fault = f"sent a batch that could not be read ({error})"
        self.process.join(_JOIN_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        else:
            fault = f"died ({say_exit(self.process.exitcode)})"
        self.outbox.put(None)
        self._blocks.close()
        self._connection.close()
        if self._why:
            self._report(Lost(self._number, self._why, None, self._noted))
        else:
            self._report(Lost(self._number, fault, self.process.exitcode, self._note.read()))

    def _hear(self, data: bytes) -> None:
        kind, *rest = ForkingPickler.loads(data)
        if kind == "ready":
            self._report(Joined(self._number))
        elif kind == "failed":
            self._report(Finished(self._number, rest[0], rest[1], 0))
        else:
            self._report(Finished(self._number, *rest))


def _serve_forked(connection: Any, note: SampleNote, parent: int, config: BuildConfig) -> None:
    for other in list(_connections):
        other.close()
    serve(connection, note, parent, config)


def say_exit(exit_code: int | None) -> str:
    """Return what an exit code means."""
    if exit_code is not None and exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:  # of the real-time signals two have names
            name = f"signal {-exit_code}"
        return f"{name}, often the out-of-memory killer" if name == "SIGKILL" else name
    return f"exit code {exit_code}"


def _pickled(config: BuildConfig) -> bytes:
    try:
        return pickle.dumps(config)
    except Exception as error:  # a class may fail in any way when it is taken apart
        raise ConfigError(
            f"processor, collate_fn and options cannot be sent to worker processes ({type(error).__name__}: {error}); "
            f"define collate_fn at the top level of a module, give the processor by its name, or use "
            f"start_method='fork' or num_workers=0"
        ) from error


def _preload(modules: list[str]) -> None:
    """Let the fork server import what builders need, unless the program has told it what to import."""
    server = multiprocessing.forkserver._forkserver
    if getattr(server, "_preload_modules", ["__main__"]) == ["__main__"]:
        multiprocessing.set_forkserver_preload([name for name in modules if name != "__main__"])


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Start a process that does not import the main module: multiprocessing looks for it in `sys.modules`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
