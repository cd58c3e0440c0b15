"""The ranks of a run, in processes that may be killed at any moment: lock step, checkpoints, resumes.

Ranks take one batch at a time together, as in training. If one of them ends, all are ended, and all resume from the
last checkpoint, with as many ranks as are wanted then.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from random import Random
from typing import Any, Final, cast

from vlm_stream.chaos.checker import Checker, Findings, OrderError
from vlm_stream.chaos.stage import Stage
from vlm_stream.chaos.trainer import Arrival, Failed, RoundEnd, Saved, train
from vlm_stream.lifetimes import without_main
from vlm_stream.state import STATE_KEY, RunState

_SAVE_EVERY: Final = 6
_COMPARE: Final = 0.1
"""Share of the batches that are built again; while data are damaged, all are."""
_STACKS_S: Final = 1.0


class EndedError(Exception):
    """A trainer has ended; `failed` is what it said, None: it was killed."""

    def __init__(self, rank: int, failed: Failed | None) -> None:
        super().__init__(f"rank {rank}: {failed.kind}: {failed.sentence}" if failed else f"rank {rank} is gone")
        self.failed = failed


class HangError(Exception):
    """No batch came for longer than anybody should wait."""


class Crew:
    """The trainers. Use it as a context manager."""

    def __init__(self, stage: Stage, checker: Checker, draw: Random, *, patience_s: float) -> None:
        """Start nothing yet."""
        self._stage, self._checker, self._draw = stage, checker, draw
        self._patience_s = patience_s
        self._context: Any = multiprocessing.get_context("forkserver")
        multiprocessing.set_forkserver_preload([train.__module__, *checker.modules()])
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        self._checkpoints: list[tuple[list[Path], RunState]] = []
        """The newest two: a file for each rank, and what is in them."""
        self._numbers = itertools.count()
        self._since = 0
        self.builders: list[int] = []
        self.findings = Findings()
        """Of the present fault."""
        self.is_damaged = False
        """Whether the present fault alters bytes: every batch is compared then."""
        self.num_batches = self.num_samples = self.num_rounds = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the trainers."""
        return [process.pid for process in self._processes]

    @property
    def num_checkpoints(self) -> int:
        """Return how many checkpoints there are to go back to."""
        return len(self._checkpoints)

    @property
    def newest(self) -> list[Path]:
        """Return the files of the newest checkpoint."""
        return self._checkpoints[-1][0]

    def start(self, world_size: int) -> None:
        """Start that many ranks from the last checkpoint; their first batches are waited for by `step`."""
        paths, state = self._checkpoints[-1] if self._checkpoints else (None, RunState())
        self._checker.begin(world_size, state)
        self._since = 0
        for rank in range(world_size):
            ours, theirs = self._context.Pipe()
            own = None if paths is None else str(paths[rank % len(paths)])  # the same on every rank, so any will do
            arguments = (theirs, self._stage.arguments, rank, world_size, own)
            process = self._context.Process(target=train, args=arguments, name=f"rank {rank}")
            with without_main():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def kill(self) -> None:
        """End all trainers, as a job is ended one of whose ranks is gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes.clear()
        self._connections.clear()
        self.builders.clear()

    def go_back(self) -> None:
        """Give the newest checkpoint up: a rank has refused it."""
        self._checkpoints.pop()
        self._checker.back_to_older()

    def step(self, during: Callable[[], None] | None = None) -> None:
        """Take the next batch of each rank, compare it with the plan, and save now and then.

        Args:
            during: Called while the ranks are on their way.

        Raises:
            EndedError: A rank has ended.
            HangError: One has not come for too long.
            OrderError: What came is not the next batch of the plan.
        """
        if during is not None:
            during()
        messages = self._gather()
        ends = [isinstance(message, RoundEnd) for message in messages]
        if any(ends):
            self._end_round(ends)
        else:
            self._compare(messages)
            self._since += 1
            if self._since >= _SAVE_EVERY:
                self._save()
        for connection in self._connections:
            _send(connection, "go")

    def show_stacks(self) -> None:
        """Let each trainer write where its threads are."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)

    def _compare(self, arrivals: list[Arrival]) -> None:
        self.builders = [pid for arrival in arrivals for pid in arrival.builders]
        for rank, arrival in enumerate(arrivals):
            compares = self.is_damaged or self._draw.random() < _COMPARE
            self.findings.add(self._checker.check(rank, arrival, compares=compares, damaged=self.is_damaged))
            self.num_batches += 1
            self.num_samples += sum(map(len, arrival.rows))

    def _end_round(self, ends: list[bool]) -> None:
        if not all(ends) or not all(map(self._checker.expects_end, range(len(ends)))):
            raise OrderError(f"the round ended on some ranks and not on others ({ends}), or before its plan")
        self._save()
        del self._checkpoints[:-1]  # what was counted of the round cannot be taken back
        self.num_rounds += 1
        state = self._checkpoints[-1][1]
        self.findings.add(self._checker.end_round(state))
        self._checker.begin(len(ends), state)

    def _save(self) -> None:
        number = next(self._numbers)
        folder = self._stage.folder / "states"
        folder.mkdir(exist_ok=True)
        paths = [folder / f"{number}-rank{rank}.json" for rank in range(len(self._processes))]
        for connection, path in zip(self._connections, paths, strict=True):
            _send(connection, str(path))
        self._gather()
        self._checkpoints.append((paths, RunState.from_dict({STATE_KEY: paths[0].read_text(encoding="utf-8")})))
        self._checker.saved()
        self._since = 0
        for old, _ in self._checkpoints[:-2]:
            for path in old:
                path.unlink()
        del self._checkpoints[:-2]
        if len({path.read_text(encoding="utf-8") for path in paths}) != 1:
            self.findings.silent += 1
            self.findings.notes.append("the ranks have different states behind the same batch")

    def _gather(self) -> list[Any]:
        """Return one message of each rank."""
        messages: dict[int, Any] = {}
        end = time.monotonic() + self._patience_s
        while len(messages) < len(self._connections):
            waiting = {each: rank for rank, each in enumerate(self._connections) if rank not in messages}
            dead = {process.sentinel: rank for rank, process in enumerate(self._processes)}
            if not (ready := wait([*waiting, *dead], max(end - time.monotonic(), 0))):
                raise HangError(f"no batch came for {self._patience_s:.0f} s")
            for connection in sorted(cast("list[Any]", ready), key=lambda each: isinstance(each, int)):
                if connection in dead:  # which its connection need not tell: a builder may have inherited it
                    raise EndedError(dead[connection], None)
                rank = waiting[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    raise EndedError(rank, None) from None
                if isinstance(message, Failed):
                    raise EndedError(rank, message)
                messages[rank] = message
        kinds = {type(message) for message in messages.values()}
        assert kinds <= {Arrival, RoundEnd} or kinds == {Saved}  # noqa: S101 - the protocol of `trainer.py`
        return [messages[rank] for rank in range(len(messages))]


def _send(connection: Any, message: str) -> None:
    with contextlib.suppress(OSError):  # it is gone, which the next message tells
        connection.send(message)
