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
import multiprocessing.util
import os
import pickle
import queue
import signal
import threading
import weakref
import zlib
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.blocks import BlockReader
from vlm_stream.dispatch.pool import Finished, Joined, Lost
from vlm_stream.dispatch.watchdog import SUSPENDED, state_of
from vlm_stream.dispatch.worker import SampleNote, serve
from vlm_stream.errors import ConfigError
from vlm_stream.lifetimes import make_folder, remove_folder, say_exit, without_main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from vlm_stream.blueprint import Blueprint, SampleRef
    from vlm_stream.build import BuildConfig, Builder, Watch
    from vlm_stream.dispatch.pool import Kind, Listener, Noted

_JOIN_S: Final = 5.0
_FOLDER: Final = "vls-"
"""Short: the path of a socket may not have more than some hundred characters."""

_connections: weakref.WeakSet[Any] = weakref.WeakSet()
"""The parent's ends. A process that is forked closes its copies, or it would keep the others' connections open."""
_descriptors = threading.Lock()
"""No connection is made or closed while another thread forks: the child would close a number that is in use again."""


class ProcessPool:
    """Builders that are processes."""

    nearness: Callable[[int, Blueprint], float] | None = None

    def __init__(
        self,
        config: BuildConfig,
        listener: Listener,
        *,
        start_method: str | None = None,
        numbers: Iterator[int] | None = None,
        confined_bytes: int | None = None,
    ) -> None:
        """Prepare; `listener` is called from threads of the pool. `numbers` are those of a pool around this one.

        With `confined_bytes` builders are confined, and may take so much memory beyond what they begin with.

        Raises:
            ConfigError: The config cannot be sent to another process.
        """
        self._context: Any = multiprocessing.get_context(start_method or "forkserver")
        # What is forked inherits the config, which then may hold what cannot be pickled.
        self._config = config if self._context.get_start_method() == "fork" else _pickled(config)
        self._confined_bytes = confined_bytes
        self._listener = listener
        self._workers: dict[int, _Worker] = {}
        self._numbers = itertools.count() if numbers is None else numbers
        self._is_closed = False
        # One thread: the first start waits for the fork server, which imports torch, and the caller need not. Nobody
        # waits for it in the end, either: a fork server that is stopped never answers.
        self._starts: queue.SimpleQueue[tuple[int, Kind] | None] = queue.SimpleQueue()
        self._starter = threading.Thread(target=self._run_starts, name="vlm-stream-start", daemon=True)
        self._starter.start()
        if self._context.get_start_method() == "forkserver":
            _preload([*config.modules(), serve.__module__])
            prepare_folder()

    def grow(self, *, is_reserve: bool = False) -> int:
        number = next(self._numbers)
        self._starts.put((number, "reserve" if is_reserve else "usual"))
        return number

    def give(self, builder: int, number: int, blueprint: Blueprint, skipped: Mapping[SampleRef, str]) -> None:
        self._tell(builder, "build", number, blueprint, skipped)

    def drop(self, builder: int, number: int) -> None:
        self._tell(builder, "drop", number)

    def stop(self, builder: int, why: str = "") -> None:
        worker = self._workers.get(builder)
        if worker is not None:
            worker.end(why)

    def suspended(self) -> list[int]:
        workers = list(self._workers.items())
        return [number for number, worker in workers if worker.is_alive and state_of(worker.process.pid) == SUSPENDED]

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in list(self._workers.values()) if worker.is_alive]

    def close(self) -> None:
        self._is_closed = True
        self._starts.put(None)
        self._starter.join(_JOIN_S)
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

    def _run_starts(self) -> None:
        while (start := self._starts.get()) is not None and not self._is_closed:
            self._start(*start)

    def _start(self, number: int, kind: Kind) -> None:
        try:
            worker = self._workers[number] = _Worker(
                self._context, Joined(number, kind), self._config, self._report, self._confined_bytes
            )
            worker.listen()  # now: once it is heard to be ready it is given batches, by its number
            if self._is_closed:  # meanwhile
                worker.end()
        except Exception as error:
            self._listener(Lost(number, f"could not be started ({type(error).__name__}: {error})", 1, None, kind))

    def _report(self, event: Any) -> None:
        if isinstance(event, Lost):
            self._workers.pop(event.builder, None)
        if not self._is_closed:
            self._listener(event)


class _Worker:
    """One process, and the parent's end of its connection."""

    def __init__(
        self, context: Any, joined: Joined, config: bytes | BuildConfig, report: Any, confined_bytes: int | None
    ) -> None:
        self._joined, self._number = joined, joined.builder
        self._report = report
        self._why = ""
        self._is_connected = True
        """So its process id is its own."""
        self._noted: Noted | None = None
        self._note = SampleNote(context)
        self.outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        parent = None if context.get_start_method() == "forkserver" else os.getpid()
        is_sent, needs_main = False, True
        if isinstance(config, bytes):
            self.outbox.put(("config", config, dict(os.environ)))
            is_sent, needs_main = True, b"__main__" in config
        target = serve if is_sent else _serve_forked
        # No lock for a fork server: it inherits nothing of ours, and if it is stopped this does not return.
        with (
            contextlib.nullcontext() if is_sent else _descriptors,
            contextlib.nullcontext() if needs_main else without_main(),
        ):
            self._connection, theirs = context.Pipe()
            _connections.add(self._connection)
            arguments = (theirs, self._note, parent, None if is_sent else config, confined_bytes)
            self.process: Any = context.Process(target=target, args=arguments, daemon=True, name="vlm-stream-worker")
            self.process.start()
            theirs.close()
        self._blocks = BlockReader(self.process.pid)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._write, self._read)]

    def listen(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Tell whether it can still answer: its object takes it for dead when its fork server was killed."""
        return self._is_connected

    def end(self, why: str = "") -> None:
        """End the process; with a reason, as one that hangs."""
        if why:
            self._noted = self._note.read()  # before it is ended: what it works on after its time is not the cause
            self._why = why
        self._kill()
        self.outbox.put(None)

    def _kill(self) -> None:
        """Kill: a stopped process would keep SIGTERM waiting.

        Not by its object alone: that takes a process for dead whose fork server was killed.
        """
        self.process.kill()
        if self._is_connected:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the process and the threads have ended; a fork server that is stopped would never tell."""
        self.process.join(_JOIN_S)
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
            self._kill()
        self._is_connected = False
        self.process.join(_JOIN_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_JOIN_S)
        else:
            fault = f"died ({say_exit(self.process.exitcode)})"
        self.outbox.put(None)
        self._blocks.close()
        with _descriptors:
            self._connection.close()
        if self._why:
            self._report(Lost(self._number, self._why, None, self._noted, self._joined.kind))
        else:
            self._report(Lost(self._number, fault, self.process.exitcode, self._note.read(), self._joined.kind))

    def _hear(self, data: bytes) -> None:
        kind, *rest = ForkingPickler.loads(data)
        if kind == "ready":
            self._report(self._joined)
        elif kind == "failed":
            self._report(Finished(self._number, rest[0], rest[1], 0))
        else:
            self._report(Finished(self._number, *rest))


def _serve_forked(
    connection: Any, note: SampleNote, parent: int, config: BuildConfig, confined_bytes: int | None
) -> None:
    for other in list(_connections):
        other.close()
    serve(connection, note, parent, config, confined_bytes)


def _pickled(config: BuildConfig) -> bytes:
    try:
        return pickle.dumps(config)
    except Exception as error:  # a class may fail in any way when it is taken apart
        raise ConfigError(
            f"processor, collate_fn and options cannot be sent to worker processes ({type(error).__name__}: {error}); "
            f"define collate_fn at the top level of a module, give the processor by its name, or use "
            f"start_method='fork' or num_workers=0"
        ) from error


class _Carried:
    """A config that only Ray's own pickle can take apart: functions of scripts and notebooks.

    Compressed, because of a config that names `__main__` a process would run the script once more.
    """

    def __init__(self, config: BuildConfig, pickled: bytes) -> None:
        self._data, self._modules = zlib.compress(pickled), config.modules()

    def open(self, watch: Watch | None = None) -> Builder:
        builder: Builder = pickle.loads(zlib.decompress(self._data)).open(watch)  # noqa: S301 - the trainer's bytes
        return builder

    def modules(self) -> list[str]:
        return [name for name in self._modules if name != "__main__"]


def for_processes(config: BuildConfig, pickled: bytes) -> Any:
    """Return a config as processes of this machine can load it; `pickled` is what builders on Ray get."""
    with contextlib.suppress(Exception):  # a class may fail in any way when it is taken apart
        if b"__main__" not in pickle.dumps(config):
            return config
    return _Carried(config, pickled)


def _preload(modules: list[str]) -> None:
    """Let the fork server import what builders need, unless the program has told it what to import."""
    server = multiprocessing.forkserver._forkserver
    if getattr(server, "_preload_modules", ["__main__"]) == ["__main__"]:
        multiprocessing.set_forkserver_preload([name for name in modules if name != "__main__"])


def prepare_folder() -> None:
    """Let the fork server's socket lie in a folder that is known to be dead once this process is; remove dead ones.

    Python's own folder would stay.
    """
    settings = getattr(multiprocessing.current_process(), "_config", {})
    if settings.get("tempdir") is not None:  # something of this process uses it already
        return
    place = make_folder(_FOLDER)
    settings["tempdir"] = str(place)
    multiprocessing.util.Finalize(None, _remove_folder, (place, os.getpid()), exitpriority=-100)


def _remove_folder(place: Path, pid: int) -> None:
    if os.getpid() == pid:
        remove_folder(place)
