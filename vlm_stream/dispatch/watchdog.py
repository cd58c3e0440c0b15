"""What a trainer is told while no batch comes: what is waited for, by whom, since when, and where everybody is.

A builder writes its stacks by a signal handler that needs no Python, so that one that is deep in a decoder, or waits
for a lock, answers too: SIGUSR1 to standard error, SIGUSR2 into an unnamed file that its parent reads by way of
`/proc`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vlm_stream.blueprint import BatchName, Planned, SampleRef
    from vlm_stream.dispatch.schedule import Schedule
    from vlm_stream.dispatch.team import Team

logger = logging.getLogger(__name__)

SAY_S: Final = 60.0
"""A trainer that waits so long for one batch is told what it waits for."""
SUSPENDED: Final = "T"
"""The state of a process that was told to stop; one that a debugger holds has another."""
_NAME: Final = "vlm-stream-stacks"
_WAIT_S: Final = 1.0
_POLL_S: Final = 0.02
_END: Final = "\n"
_WAY_OUT: Final = "loader.stacks() shows where each builder is (kill -USR1 PID: on its standard error)"


def say_what_is_waited_for(
    schedule: Schedule, team: Team, head: Planned | None, now: float, seconds: float, hang_s: float | None
) -> str:
    """Return the sentence; `head` is the next batch, None where it is not planned yet."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    start = f"no batch for {seconds:.0f} s, since {since}: "
    if head is None:
        return f"{start}the plan has not come to its next step, which reads indexes of shards; {_WAY_OUT}"
    name = head.blueprint.name
    what = f"rank {name.rank} waits for step {name.step}, micro-batch {name.micro}"
    told = ", ".join(
        f"builder {number} has been silent for {schedule.busy_for(number, now):.0f} s"
        for number in team.active
        if schedule.head in schedule.queued(number)
    )
    unset = "after minutes if nobody else can help (worker_timeout is not set)"
    patience = unset if hang_s is None else f"after {hang_s:g} s"
    return (
        f"{start}{what}; {told or 'no builder has it'}; {len(team.active)} builders are alive, "
        f"{len(team.starting)} are being started, {schedule.num_ready} batches are ready behind it. A silent builder "
        f"is replaced {patience}, or when another one finishes its batch; {_WAY_OUT}"
    )


class InlineWatch:
    """Says what this process plans or builds when that takes long. It is a builder's watch, and a context manager."""

    def __init__(self) -> None:
        self._work: tuple[float, str] | None = None  # since when, and what
        self._sample: SampleRef | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlm-stream-watch", daemon=True)

    def __enter__(self) -> InlineWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_closed.set()

    def build(self, name: BatchName) -> None:
        self._work = time.monotonic(), f"step {name.step}, micro-batch {name.micro} of rank {name.rank} is being built"

    def plan(self) -> None:
        self._work = time.monotonic(), "the plan has not come to its next step, which reads indexes of shards"

    def rest(self) -> None:
        """Note that nothing is done here: the trainer has its batch."""
        self._work = None

    def begin(self, ref: SampleRef) -> None:
        self._sample = ref

    def end(self) -> None:
        self._sample = None

    def _run(self) -> None:
        told: tuple[tuple[float, str] | None, float] = (None, 0.0)
        while not self._is_closed.wait(SAY_S / 10):
            work, sample, now = self._work, self._sample, time.monotonic()
            since = told[1] if work is told[0] else 0.0
            if work is None or now - max(work[0], since) < SAY_S:
                continue
            told = work, now
            which = "" if sample is None else ", at row {2} of shard {1} of source {0}".format(*sample)
            logger.warning(
                "no batch for %.0f s: %s in this process (num_workers=0)%s; loader.stacks() in another thread shows "
                "where it is, and with num_workers=1 and worker_timeout a sample that hangs is left out",
                now - work[0],
                work[1],
                which,
            )


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
        return _wait_for(path, before) or f"process {pid} does not answer ({_say_state(pid)})"
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


def state_of(pid: int) -> str:
    """Return the letter that the system has for a process's state; none where there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _say_state(pid: int) -> str:
    letter = state_of(pid)
    known = {SUSPENDED: "it is stopped", "D": "it waits for a disk", "Z": "it is dead", "": "it is gone"}
    return known.get(letter, f"its state is {letter}")


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
