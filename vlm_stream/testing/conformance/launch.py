"""Start the processes of a run, wait for them, and leave none behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Final

from vlm_stream.testing.conformance.run import Records, Run

_GRACE_S: Final = 20.0  # how long peers of a process that has ended may go on
_ORPHANS_S: Final = 5.0  # how long ranks that a trainer started itself may outlive it
_TAIL: Final = 30


class LaunchError(AssertionError):
    """A process of the trainer under test ended otherwise than it should have."""


def launch(function: str, run: Run, *, world: int = 2, own_launcher: bool = False, timeout_s: float = 300.0) -> Records:
    """Run a trainer in real processes and return what its models were given.

    Args:
        function: "package.module:function", importable from here and called with the run.
        run: What to do. Processes kill themselves if it has `kill_after`.
        world: Number of ranks.
        own_launcher: The trainer starts the processes of its ranks itself (`run.world` of them): start one only,
            without torchrun's variables.
        timeout_s: How long it may take.

    Raises:
        LaunchError: A process failed, took too long, or outlived the kill; with the last lines of its output.
    """
    run = replace(run, world=world)
    run.records.mkdir(parents=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.to_file(run.records / "run.json")
    port = _free_port()
    processes = []
    for rank in range(1 if own_launcher else world):
        names = {} if own_launcher else _torchrun_names(rank, world, port)
        with (run.records / f"output-{rank}.txt").open("w") as output:
            processes.append(
                subprocess.Popen(  # noqa: S603
                    [sys.executable, "-m", "vlm_stream.testing.conformance", function, str(path)],
                    env=_environment() | names,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # what it starts itself ends with it
                )
            )
    try:
        timed_out = _wait(processes, timeout_s)
        if own_launcher and run.kill_after is not None:
            _await_deaths(run)
    finally:
        for process in processes:
            _end(process)
    codes = [process.returncode for process in processes]
    if timed_out:
        raise LaunchError(f"{function} on {world} ranks did not end within {timeout_s:.0f} s{_tails(run, codes)}")
    records = Records.read(run.records)
    if run.kill_after is None and any(codes):
        raise LaunchError(f"{function} on {world} ranks ended with the exit codes {codes}{_tails(run, codes)}")
    if run.kill_after is not None:
        _check_killed(function, run, records, codes)
    return records


def _check_killed(function: str, run: Run, records: Records, codes: list[int]) -> None:
    """A rank may miss the last batch before the kill: its peer is dead already, and it waits for an answer."""
    seen = [len(records.train.get(rank, [])) for rank in range(run.world)]
    wanted = run.kill_after or 0
    if max(seen) != wanted or min(seen) < wanted - 1 or not any(codes):
        raise LaunchError(
            f"{function} on {run.world} ranks was to be killed in training forward {wanted}, but the ranks had {seen} "
            f"forwards and the exit codes are {codes}{_tails(run, codes)}"
        )


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait for all of them, or for a while after the first that failed; return whether the time was over."""
    end = time.monotonic() + timeout_s
    failed_at = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if now > end:
            return True
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE_S:
            break
        time.sleep(0.05)
    return False


def _await_deaths(run: Run) -> None:
    """Wait until the ranks that a killed process has left behind were given their last batch, too."""
    end = time.monotonic() + _ORPHANS_S
    while time.monotonic() < end:
        train = Records.read(run.records).train
        if all(len(train.get(rank, [])) >= (run.kill_after or 0) for rank in range(run.world)):
            return
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the session of a process: itself and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _torchrun_names(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _environment() -> dict[str, str]:
    """Return this process' environment without a launcher's traces, and with its own import path."""
    left_out = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    path = os.pathsep.join(dict.fromkeys(os.path.abspath(place) for place in sys.path))  # noqa: PTH100
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _tails(run: Run, codes: list[int]) -> str:
    text = ""
    for rank, code in enumerate(codes):
        lines = (run.records / f"output-{rank}.txt").read_text(errors="replace").splitlines()
        text += f"\n--- process {rank}, exit code {code}, the last of {len(lines)} lines:\n" + "\n".join(lines[-_TAIL:])
    return text
