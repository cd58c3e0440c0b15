"""The object-store library of this process, whole also after a fork.

obstore drives every request on one background runtime per loaded library. A fork copies the library and none of its
threads: the first request in the child would wait for ever. PyTorch forks its loader workers after the parent has read
a manifest, so this is the common case and not a rare one. The child therefore loads the library a second time, from an
anonymous copy of its file, which brings a runtime of its own (measured: 11 ms, 15 MB). Where the system has no
anonymous files the child is told to start by spawn.

It must not know URLs, options or credentials.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
from multiprocessing import parent_process
from typing import Any

from vlm_stream.errors import StorageError

__all__ = ["obstore_here"]

# One lock per process: a fork may come while another thread of the parent holds the parent's.
_LOCKS: dict[int, threading.Lock] = {}
_LOADED: dict[int, Any] = {}
# What belonged to the parent is kept for ever: to free it would wait for threads that did not survive the fork.
_INHERITED: list[Any] = []


def obstore_here() -> Any:
    """Return an `obstore` module whose runtime lives in this process."""
    pid = os.getpid()
    module = _LOADED.get(pid)
    if module is not None:
        return module
    with _LOCKS.setdefault(pid, threading.Lock()):
        if pid not in _LOADED:
            # A child process that finds the library loaded may have inherited it from whoever used it before.
            inherited = bool(_LOADED) or ("obstore._obstore" in sys.modules and bool(parent_process()))
            _INHERITED.extend(_LOADED.values())
            _LOADED.clear()
            _LOADED[pid] = _load_again() if inherited else importlib.import_module("obstore")
        return _LOADED[pid]


def _load_again() -> Any:
    """Import obstore and its native part anew; the old modules stay alive, unused."""
    if not hasattr(os, "memfd_create"):
        raise StorageError(
            f"Process {os.getpid()} was forked after its parent had read from an object store, and such a child cannot "
            f"read on this system. Start workers with multiprocessing_context='spawn' (or 'forkserver')."
        )
    names = [name for name in sys.modules if name == "obstore" or name.startswith("obstore.")]
    old = {name: sys.modules.pop(name) for name in names}
    _INHERITED.append(old)
    native_name = "obstore._obstore"
    path = _anonymous_copy(old[native_name].__file__)
    loader = importlib.machinery.ExtensionFileLoader(native_name, path)
    spec = importlib.util.spec_from_file_location(native_name, path, loader=loader)
    if spec is None:
        raise StorageError(f"The native part of obstore could not be loaded from {path} in a forked process.")
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    sys.modules[native_name] = native
    return importlib.import_module("obstore")


def _anonymous_copy(path: Any) -> str:
    """Return a path to a copy that no folder holds; the loader would give back the old library for the old file."""
    copy = os.memfd_create("obstore")
    with open(path, "rb") as file:  # noqa: PTH123
        size = os.fstat(file.fileno()).st_size
        num_copied = 0
        while num_copied < size:
            num_copied += os.sendfile(copy, file.fileno(), num_copied, size - num_copied)
    return f"/proc/self/fd/{copy}"
