"""Where the threads of a process are: asked for when a batch does not come.

A builder writes its stacks by a signal handler that needs no Python, so that one that is deep in a decoder, or waits
for a lock, answers too: SIGUSR1 to standard error, SIGUSR2 into an unnamed file that its parent reads by way of
`/proc`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Final

_NAME: Final = "vlm-stream-stacks"
_WAIT_S: Final = 1.0
_POLL_S: Final = 0.02
_END: Final = "\n"


def offer_stacks() -> None:
    """Let this builder write its stacks when it is asked to."""
    with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):  # no such signals, files or stderr
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        faulthandler.register(signal.SIGUSR2, file=os.memfd_create(_NAME), all_threads=True)


def read_stacks(pid: int) -> str:
    """Return the stacks of a builder of this machine, or why there are none."""
    try:
        path = next(
            each for each in Path(f"/proc/{pid}/fd").iterdir() if str(each.readlink()).startswith(f"/memfd:{_NAME}")
        )
        before = path.stat().st_size
        os.kill(pid, signal.SIGUSR2)
        return _wait_for(path, before) or f"process {pid} does not answer ({_state(pid)})"
    except (OSError, StopIteration):
        return f"process {pid} has no stacks to show (it is gone, is being started, or this is not Linux)"


def _wait_for(path: Path, before: int) -> str:
    """Return what is written behind a place, once no more comes."""
    end = time.monotonic() + _WAIT_S
    text = ""
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        with path.open("rb") as file:
            file.seek(before)
            found = file.read().decode("utf-8", "replace")
        if found and found == text and found.endswith(_END):
            break
        text = found
    return text


def _state(pid: int) -> str:
    letter = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    return {"T": "it is stopped", "D": "it waits for a disk", "Z": "it is dead"}.get(letter, f"its state is {letter}")


def all_stacks(builders: list[int]) -> str:
    """Return the stacks of this process and of its builders."""
    told = [f"worker {pid}:\n{read_stacks(pid)}" for pid in builders]
    return "\n".join([f"trainer {os.getpid()}:", own_stacks(), *told])


def own_stacks() -> str:
    """Return the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
