"""One rank of a trainer without a model, in a process of its own: it tells what it was given, and saves when told.

Enters: the arguments of a loader, a rank, the file of a state. Leaves, by a connection: `Arrival` for each batch,
`RoundEnd`, `Saved`, and `Failed` with the sentence of an error. It waits for an answer after each, as ranks wait for
each other in training.
"""

import faulthandler
import hashlib
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vlm_stream.blueprint import BatchName, Planned
from vlm_stream.build import Delivery
from vlm_stream.errors import VlmStreamError
from vlm_stream.loader import StreamLoader
from vlm_stream.state import STATE_KEY

SampleName = tuple[str, str, str]
"""Source, shard and key."""


class Arrival(NamedTuple):
    """A batch that was handed out."""

    name: BatchName
    rows: list[list[SampleName]]
    """What is in it."""
    bad: list[tuple[SampleName, str]]
    """What the ledger says is not, and why."""
    digest: str
    """Of its tensors."""
    builders: list[int]
    """Process ids."""


class RoundEnd(NamedTuple):
    """The iteration has come to its end."""


class Saved(NamedTuple):
    """The state was written."""


class Failed(NamedTuple):
    """The trainer ends by an error."""

    kind: str
    sentence: str
    is_ours: bool
    """Whether it is an error that says what to do."""


class _Recorder(StreamLoader):
    """Remembers the delivery that a batch came from."""

    delivery: Delivery

    def _handed_out(self, planned: Planned, delivery: Delivery, waited_s: float) -> None:
        super()._handed_out(planned, delivery, waited_s)
        self.delivery = delivery


def train(connection: Any, arguments: dict[str, Any], rank: int, world_size: int, state: str | None) -> None:
    """Train until told to stop, or until nobody listens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2, all_threads=True)
    try:
        _train(connection, _Recorder(**arguments, rank=rank, world_size=world_size), state)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # whoever started this is gone
        pass
    except BaseException as error:
        connection.send(Failed(type(error).__name__, str(error), isinstance(error, VlmStreamError)))


def _train(connection: Any, loader: StreamLoader, state: str | None) -> None:
    if state is not None:
        loader.load_state_dict({STATE_KEY: Path(state).read_text(encoding="utf-8")})
    with loader:
        while True:
            for batch in loader:
                connection.send(_arrival(loader, batch))
                if not _obey(connection, loader):
                    return
            connection.send(RoundEnd())
            if not _obey(connection, loader):
                return


def _arrival(loader: Any, batch: dict[str, Any]) -> Arrival:
    refs = batch["refs"]
    return Arrival(
        loader.delivery.name,
        [[(source, shard, key) for source, shard, key, *_ in row] for row in refs],
        [((line.source, line.shard, line.sample), f"{line.stage}: {line.reason}") for line in loader.delivery.bad],
        digest_of(batch),
        loader.worker_pids(),
    )


def _obey(connection: Any, loader: StreamLoader) -> bool:
    """Do what the answer says; tell whether to go on. An answer is "go", "stop", or the file for the state."""
    while (answer := connection.recv()) not in ("go", "stop"):
        with open(answer, "w", encoding="utf-8") as file:  # noqa: PTH123 - as a trainer would
            file.write(loader.state_dict()[STATE_KEY])
            file.flush()
            os.fsync(file.fileno())
        connection.send(Saved())
    return bool(answer == "go")


def digest_of(batch: Any) -> str:
    """Return what identifies the values of a batch; the names of its samples are left out."""
    state = hashlib.blake2b(digest_size=16)
    _feed(state, {key: value for key, value in batch.items() if key != "refs"})
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            state.update(str(key).encode())
            _feed(state, value[key])
    elif isinstance(value, list | tuple):
        state.update(b"[%d]" % len(value))
        for each in value:
            _feed(state, each)
    else:
        state.update(pickle.dumps(value))
