"""What this process and all that it has started take: processor time and memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil

__all__ = ["CpuMeter", "PeakMemory", "seconds_since_start", "unshared_bytes"]


def _tree() -> list[psutil.Process]:
    root = psutil.Process()
    return [root, *root.children(recursive=True)]


class CpuMeter:
    """Processor seconds of this process and its descendants, also of those that have ended.

    What a process took is added to its parent's count of children when the parent waits for it. Some parents never do
    (Ray's), so that what was last seen of their children must be kept here. Ask often: what a process takes between the
    last time that it was seen and its end is lost where its parent does not wait.
    """

    def __init__(self) -> None:
        self._seen: dict[psutil.Process, tuple[int, float, float]] = {}
        """Parent, own seconds with those of children waited for, and these alone."""
        self._lost = 0.0

    def seconds(self) -> float:
        """Return the sum until now."""
        now = {}
        for process in _tree():
            try:
                times = process.cpu_times()
                of_children = times.children_user + times.children_system
                now[process] = (process.ppid(), times.user + times.system + of_children, of_children)
            except psutil.NoSuchProcess:
                continue
        gained = {process.pid: each[2] - self._seen.get(process, (0, 0.0, 0.0))[2] for process, each in now.items()}
        ended: dict[int, float] = {}
        for parent, seconds, _ in (each for process, each in self._seen.items() if process not in now):
            ended[parent] = ended.get(parent, 0.0) + seconds
        self._lost += sum(max(0.0, seconds - gained.get(parent, 0.0)) for parent, seconds in ended.items())
        self._seen = now
        return self._lost + sum(seconds for _, seconds, _ in now.values())


def unshared_bytes() -> int:
    """Return the memory of this process and its descendants that files do not back; what they share counts once."""
    total = 0
    for process in _tree():
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total << 10


def seconds_since_start() -> float:
    """Return how long ago this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class PeakMemory:
    """Watches the memory of this process and its descendants. Use it as a context manager."""

    def __init__(self, every_s: float = 0.5) -> None:
        self.peak = 0
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, unshared_bytes())

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            self.peak = max(self.peak, unshared_bytes())
