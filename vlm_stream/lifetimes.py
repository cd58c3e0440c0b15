"""What lives as long as a process: its children, and folders that it fills.

A process may be killed at any moment, so nothing here counts on a last word: children are killed by the system or see
that their parent is another one, and a folder has a lock that the system gives up with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_S: Final = 1.0
_SET_DEATH_SIGNAL: Final = 1
_LOCK: Final = "lock"

_locks: dict[str, Any] = {}
"""Open files of the folders that this process has made."""


def die_with_parent(parent: int | None) -> None:
    """End this process when whoever started it has gone, whatever it is waiting for.

    Args:
        parent: Its process id; None: a fork server stands between.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not Linux
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # one that is stopped cannot look by itself
    server = multiprocessing.forkserver._forkserver
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None and parent is None:  # as long as anybody holds it the server lives, and does not end us
        server._forkserver_alive_fd = None  # type: ignore[attr-defined]
        os.close(alive)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int | None) -> None:
    while _lives(parent):
        time.sleep(_POLL_S)
    os._exit(1)


def _lives(parent: int | None) -> bool:
    if parent is not None:
        return os.getppid() == parent
    process = multiprocessing.parent_process()
    return process is not None and process.is_alive()


def say_exit(exit_code: int | None) -> str:
    """Return what an exit code means."""
    if exit_code is not None and exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:  # of the real-time signals two have names
            name = f"signal {-exit_code}"
        return f"{name}, often the out-of-memory killer" if name == "SIGKILL" else name
    return f"exit code {exit_code}"


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Start a process that does not import the main module: multiprocessing looks for it in `sys.modules`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def make_folder(prefix: str, parent: str | None = None) -> Path:
    """Return a new temporary folder, and remove those that dead processes have left beside it.

    Args:
        prefix: How the names of such folders begin.
        parent: Where they lie; None: the system's temporary folder.

    Raises:
        OSError: There is no room for it.
    """
    root = Path(parent or tempfile.gettempdir())
    for place in root.glob(f"{prefix}*"):
        _remove_dead(place)
    place = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    _locks[str(place)] = _lock_in(place)
    return place


def remove_folder(place: Path) -> None:
    """Remove a folder that this process has made."""
    lock = _locks.pop(str(place), None)
    shutil.rmtree(place, ignore_errors=True)
    if lock is not None:
        lock.close()


def _lock_in(place: Path) -> Any:
    """Return the lock, held; it gets its name after that, so that nobody takes a folder for dead that is being made."""
    try:
        import fcntl

        new = place / f"{_LOCK}.new"
        file = new.open("wb")
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        new.rename(place / _LOCK)
    except (ImportError, OSError):  # no locks here: the folder stays if this process is killed
        return None
    return file


def _remove_dead(place: Path) -> None:
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        lock = place / _LOCK
        if place.is_symlink() or place.stat().st_uid != os.getuid() or not lock.is_file():
            return
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
