"""Processes of the local engine that die, or whose parent does, at moments that are hard to hit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from vlm_stream.convert.engines import LocalEngine
from vlm_stream.errors import ConfigError

SIZE = 1 << 20


class DyingInItsResult:
    """Returns a megabyte; its process is killed once when 30 kB of that have been written."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(self, task: int) -> bytes:
        if task == 3 and not self.flag.exists():
            self.flag.touch()
            Connection._send = _send_and_die
        return bytes([task]) * SIZE


def _send_and_die(self: Connection, buf: bytes) -> None:
    os.write(self._handle, bytes(buf)[:30_000])
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_in_the_middle_of_a_result_costs_that_result(tmp_path: Path, caplog) -> None:
    results = list(LocalEngine(2).run(DyingInItsResult(tmp_path / "flag"), range(8)))
    assert (tmp_path / "flag").exists()
    assert sorted(results) == [bytes([task]) * SIZE for task in range(8)]
    assert "a worker process died; what it worked on is run again" in caplog.text


class Counted:
    """Notes each call; task 2 ends its process once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, task: int) -> int:
        with (self.folder / str(task)).open("a") as file:
            file.write("x")
        if task == 2 and (self.folder / "2").read_text() == "x":
            os.kill(os.getpid(), signal.SIGSEGV)
        return task


def test_a_death_costs_one_rebuild(tmp_path: Path) -> None:
    assert sorted(LocalEngine(2).run(Counted(tmp_path), iter(range(12)))) == list(range(12))
    calls = {int(path.name): len(path.read_text()) for path in tmp_path.iterdir()}
    assert calls == {task: 1 + (task == 2) for task in range(12)}


def raise_error(task: int) -> int:
    if task == 5:
        raise ConfigError("task 5 is wrong")
    return task


def test_errors_of_tasks_come_with_where_they_were_raised() -> None:
    with pytest.raises(ConfigError, match="task 5 is wrong") as caught:
        list(LocalEngine(2).run(raise_error, range(10)))
    assert "in raise_error" in str(caught.value.__cause__)


def wait_long(task: int) -> None:
    Path(os.environ["BEGUN"], str(os.getpid())).touch()
    time.sleep(600)


SCRIPT = """
import multiprocessing, os, threading, time
from multiprocessing.resource_tracker import _resource_tracker
from tests.convert.test_engine_processes import LocalEngine, wait_long
threading.Thread(target=lambda: list(LocalEngine(2).run(wait_long, range(9))), daemon=True).start()
while len(os.listdir(os.environ["BEGUN"])) < 2:
    time.sleep(0.05)
print(_resource_tracker._pid, *[child.pid for child in multiprocessing.active_children()], flush=True)
time.sleep(600)
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux for processes")
def test_processes_end_with_their_parent_also_if_they_are_stopped(tmp_path: Path) -> None:
    environment = os.environ | {"BEGUN": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    os.kill(pids[-1], signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_is_running, pids))
