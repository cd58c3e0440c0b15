"""What is left of a trainer when everything of it is killed at once: nothing that the next start does not remove."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.dispatch.jobs import Numbers, dispatch
from tests.dispatch.test_dispatcher import is_running
from tests.waiting import wait_for

SCRIPT = """
import multiprocessing.forkserver, os, sys, time
from tests.dispatch.test_dispatcher import Big, dispatch
d = dispatch(Big(), num_workers=2, start_method="forkserver")
next(d)
print(multiprocessing.forkserver._forkserver._forkserver_pid, *d.pids(), flush=True)
time.sleep(600)
"""


def start_and_end(folder):
    """Start another trainer, which ends in the usual way."""
    code = "from tests.dispatch.jobs import Numbers, run; run(Numbers(), start_method='forkserver', count=3)"
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@contextmanager
def alive_folder(root):
    """A folder that another process has locked."""
    place = root / "vls-other"
    place.mkdir()
    with (place / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield place


def test_nothing_is_left_of_processes_that_are_all_killed_at_once(tmp_path):
    memory = set(os.listdir("/dev/shm"))  # noqa: PTH208
    trainer = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())},
        text=True,
    )
    pids = [trainer.pid, *map(int, trainer.stdout.readline().split())]
    assert len(pids) >= 4
    (left,) = tmp_path.glob("vls-*")
    start_and_end(tmp_path)
    assert left.exists()  # whose trainer is alive
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    wait_for(lambda: not any(map(is_running, pids)))
    assert not [name for name in set(os.listdir("/dev/shm")) - memory if "vlm" in name or name.startswith("pym-")]  # noqa: PTH208
    assert [place.name for place in tmp_path.iterdir()] == [left.name]  # by the fork server
    with alive_folder(tmp_path) as living:
        start_and_end(tmp_path)
        assert list(tmp_path.iterdir()) == [living]


class Pixels(Numbers):
    """Batches of tensors that travel in blocks of shared memory."""

    def make(self, number):
        return super().make(number) | {"pixels": torch.full((1 << 20,), number)}


def usage():
    """Return descriptors, shared mappings and threads of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), len(shared_memory()), len(threading.enumerate())


def shared_memory():
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "memfd" in line or "/dev/shm" in line]


def run_and_stop(how):
    dispatcher = dispatch(Pixels(num_bytes=1 << 23), num_workers=2, max_restarts=100)
    for count, (_, delivery) in enumerate(dispatcher):
        assert delivery.batch["pixels"][-1] == count
        if how == "kill" and count in (3, 9):
            os.kill(dispatcher.pids()[0], signal.SIGKILL)
        if count == 15:
            break
    del delivery, _
    assert [line for line in shared_memory() if "memfd" in line]
    dispatcher.close()
    wait_for(lambda: not any("memfd" in line for line in shared_memory()))  # also of batches that nobody took


@pytest.mark.parametrize("how", ["close early", "kill"])
def test_nothing_grows_in_a_trainer_whose_workers_are_closed_early_or_killed(how):
    run_and_stop(how)
    before = usage()
    for _ in range(6):
        run_and_stop(how)
    wait_for(lambda: all(now <= then for now, then in zip(usage(), before, strict=True)))
