"""A process of the local engine: the child's side of `processes.py`.

It listens on one connection: the function first, then tasks. Its answers are `(True, result)` and `(False, error,
trace)`, in the order of the tasks. A thread reads, so that whoever gives tasks never waits for one to be finished.

A function may note which record it works on, in memory that outlives the process: a decoder may end it.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import traceback
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.allocator import keep_freed_memory
from vlm_stream.errors import hide_secrets
from vlm_stream.lifetimes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_RECORD: Final = -1
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
    """Run tasks until the parent hangs up."""
    global _note, _left_out
    _note, _left_out = note, left_out
    die_with_parent(parent)
    keep_freed_memory()
    inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    with contextlib.suppress(OSError, KeyboardInterrupt):  # nobody is there to be told; Ctrl-C is the parent's to tell
        _serve(connection, inbox)


def _read(connection: Any, inbox: queue.SimpleQueue[bytes | None]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv_bytes())
    inbox.put(None)


def _serve(connection: Any, inbox: queue.SimpleQueue[bytes | None]) -> None:
    packed = inbox.get()
    function = None
    while packed is not None and (data := inbox.get()) is not None:
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
