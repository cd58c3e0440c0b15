"""What every loader of the comparison is asked for, in its own terms.

A loader writes records with its own writer and is then opened in several ways. It does here what its documentation
tells users to do, with the settings that suit it best; nothing is reimplemented on its behalf.
"""

from __future__ import annotations

import multiprocessing
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.peers.data import Record

__all__ = ["Loader", "Opening", "Run"]


@dataclass(frozen=True)
class Opening:
    """How a loader is opened."""

    where: str
    """Folder or `s3://` URL that holds what `write` made. The S3 endpoint and keys are in the environment
    (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`)."""
    workers: int = 0
    """Worker processes; 0: everything in this one."""
    batch_size: int = 16
    shuffle: int = 0
    """How many samples a shuffle mixes; 0: the order of the files."""
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    transform: Callable[[dict[str, bytes]], Any] | None = None
    """Called in the worker for each sample with its members (`json`, `0.jpg`, ...; keys in order, and `__key__` as
    text); its results are what batches hold. None: the members themselves."""
    scratch: str = ""
    """An empty folder for what the loader keeps on disk (caches, downloaded shards)."""
    hooked: int = 16
    """How many samples a loader's own packing chooses from, where it holds them encoded."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the loader itself, for the ways in which it is measured."""


class Run(ABC):
    """A loader at work: one epoch of batches, each a list of transformed samples; or of packs."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Yield batches, or packs."""

    def state(self) -> bytes:
        """Return what must be saved to go on behind the last batch that was yielded, serialised."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Return what the loader itself says of samples that it left out."""
        return []

    def close(self) -> None:
        """Stop workers, if iteration was left early."""
        return

    def worker_pids(self) -> list[int]:
        """Return the processes that build samples: the children of torch's `DataLoader`."""
        return [child.pid for child in multiprocessing.active_children() if child.pid]


class Loader(ABC):
    """One of the compared loaders."""

    name: ClassVar[str]
    package: ClassVar[str]
    """Name of its distribution."""
    cannot: ClassVar[dict[str, str]] = {}
    """What it has no way to do, with the reason in a line: keys `state`, `world` (resume with another one), `ranks`
    (here, one after the other), `links`, `header`."""
    files: ClassVar[str] = "*.tar"
    """Which of its files hold samples, for the figures that damage one."""

    def version(self) -> str:
        """Return the installed version."""
        return version(self.package)

    @abstractmethod
    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Write records with the loader's own writer, ready to be opened."""

    @abstractmethod
    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open what was written; with a state, behind the batch at which it was taken."""

    def merge(self, states: Sequence[bytes], rank: int) -> bytes:
        """Return what a rank goes on from, of the states of all ranks; as it is, they are all the same."""
        return states[rank % len(states)]

    def packs(self, opening: Opening, capacity: int, states: Sequence[bytes] = ()) -> Run:
        """Open for packs of so many tokens; the transform makes samples with `key` and `length`.

        With the states of all ranks that were saved, behind the packs at which they were taken.
        """
        from benchmarks.peers.work import HandPacked

        return HandPacked(self, opening, capacity, states)
