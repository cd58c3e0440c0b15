"""Batches that several loaders want are built once: tensor-, context- and pipeline-parallel peers, runs of one plan.

Enters: blueprints on their way to a pool. A loader that is about to build one first claims its name on a board that the
others see. Whoever has the claim builds and posts; the others take what was posted. A board keeps no promise: where it
is lost, a claim is held too long or a post is gone, each loader builds for itself, and the batch is the same.

`ShmBoard` is a folder of shared memory on one machine: a claim is a locked file, which the system unlocks when its
process dies. `ray_board.py` is one for machines of a Ray cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import mmap
import os
import queue
import shutil
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from vlm_stream.dispatch.parcel import join, pack, split, unpack
from vlm_stream.dispatch.pool import PEER, Failure, Finished, Lent, Unlent
from vlm_stream.errors import WorkerError, hide_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vlm_stream.blueprint import BatchName, Blueprint, SampleRef
    from vlm_stream.build import Delivery
    from vlm_stream.dispatch.pool import Event, Listener, Pool

    _Found: TypeAlias = Delivery | Literal["wait", "gone"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_LOOK_S: Final = 0.005
_JOIN_S: Final = 5.0
_KEPT_BYTES: Final = 512 << 20
_KEPT_S: Final = 120.0
"""What was posted is removed when all have it, or when it is more or older than this: somebody does not want it."""


class Board(Protocol):
    """Where loaders see what others build. An error of it costs a batch that is built twice, and nothing else."""

    def claim(self, key: str) -> bool:
        """Tell whether this loader shall build a batch."""

    def post(self, key: str, finished: Finished) -> None:
        """Offer a finished batch to the others."""

    def release(self, key: str) -> None:
        """Give a claim back: the batch was not built."""

    def look(self, key: str) -> _Found:
        """Return a batch that another loader has claimed, once it is there; gone: it will not come."""

    def close(self) -> None:
        """Give everything back."""


class SharedPool:
    """A pool that builds only what no other loader is building."""

    def __init__(self, open_pool: Callable[[Listener], Pool], listener: Listener, board: Board) -> None:
        """Stand before the pool that `open_pool` makes."""
        self._listener, self._board = listener, board
        self._keys: dict[int | None, str] = {}
        """Of the batches that this loader builds, by number."""
        self._lent: dict[int, str] = {}
        self._refused: set[int | None] = set()
        """Those that others had claimed: given again they are built here, for they were late or did not come."""
        self._has_warned = False
        self._inbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        try:
            self._pool = open_pool(self._on_event)
        except BaseException:
            board.close()
            raise
        self.nearness = self._pool.nearness
        self._thread = threading.Thread(target=self._run, name="vlm-stream-shared", daemon=True)
        self._thread.start()

    def grow(self, *, is_reserve: bool = False) -> int:
        return self._pool.grow(is_reserve=is_reserve)

    def give(self, builder: int, number: int, blueprint: Blueprint, skipped: Mapping[SampleRef, str]) -> None:
        """Let a builder build a batch, unless another loader does."""
        self._inbox.put((builder, number, blueprint, skipped))

    def drop(self, builder: int, number: int) -> None:
        self._inbox.put((builder, number))

    def stop(self, builder: int, why: str = "") -> None:
        self._pool.stop(builder, why)

    def suspended(self) -> list[int]:
        return self._pool.suspended()

    def pids(self) -> list[int]:
        return self._pool.pids()

    def close(self) -> None:
        """End all builders and give claims back."""
        self._inbox.put(None)
        self._thread.join(_JOIN_S)  # it may wait for a board; what it says after this is not heard
        self._pool.close()
        self._ask(self._board.close, None)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Finished) and (key := self._keys.pop(event.number, None)) is not None:
            self._refused.discard(event.number)
            is_posted = not isinstance(event.result, Failure) and self._ask(lambda: self._post(key, event), False)
            if not is_posted:
                self._ask(lambda: self._board.release(key), None)
        self._listener(event)

    def _post(self, key: str, event: Finished) -> bool:
        self._board.post(key, event)
        return True

    def _ask(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Ask the board. Threads of the pool do, which no error of it must end, nor a trainer that goes away."""
        try:
            return ask()
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the board on which batches are shared fails (%s: %s), so this loader builds some of them that "
                    "others build too; no batch is lost",
                    type(error).__name__,
                    hide_secrets(str(error)),
                )
            return otherwise

    def _run(self) -> None:
        while True:
            try:
                message = self._inbox.get(timeout=_LOOK_S if self._lent else None)
            except queue.Empty:
                self._look()
                continue
            if message is None:
                return
            if len(message) == 2:
                self._pool.drop(*message)
            else:
                self._give(*message)

    def _give(self, builder: int, number: int, blueprint: Blueprint, skipped: Mapping[SampleRef, str]) -> None:
        key = _key_of(blueprint.name)
        self._lent.pop(number, None)
        is_own = number in self._keys or number in self._refused
        if is_own or self._ask(lambda: self._board.claim(key), True):
            self._keys[number] = key
            self._pool.give(builder, number, blueprint, skipped)
            return
        self._lent[number] = key
        self._refused.add(number)
        self._listener(Lent(builder, number))

    def _look(self) -> None:
        for number, key in list(self._lent.items()):
            look: Callable[[], _Found] = functools.partial(self._board.look, key)
            found: _Found = self._ask(look, "gone")
            if found == "wait":
                continue
            del self._lent[number]
            if not isinstance(found, str):
                self._refused.discard(number)
            self._listener(Unlent(number) if isinstance(found, str) else Finished(PEER, number, found, 0))


def _key_of(name: BatchName) -> str:
    return f"{name.plan[:16]}-{name.step}-{name.rank}-{name.micro}"


class ShmBoard:
    """A board of the loaders on one machine that build by the same config."""

    def __init__(self, group: str, peers: int, root: Path | None = None) -> None:
        """Join the others.

        Args:
            group: The same for loaders whose batches of one name are the same.
            peers: How many loaders want each batch, this one included.
            root: Where boards are; by default shared memory.
        """
        self._others = peers - 1
        memory = Path("/dev/shm")  # noqa: S108 - a folder of this user's is made in it
        base = root or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
        boards = base / f"vlm-stream-boards-{os.getuid()}"
        boards.mkdir(mode=0o700, exist_ok=True)
        if boards.stat().st_uid != os.getuid():
            raise WorkerError(f"{boards} belongs to another user, so batches cannot be shared in it; remove it")
        self._folder = boards / group
        with _alone(boards):
            for folder in boards.iterdir():
                _remove_if_dead(folder)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._member = _lock(self._folder / "members", fcntl.LOCK_SH)
        self._claims: dict[str, int] = {}
        self._posted: deque[tuple[str, float, int]] = deque()
        self._guard = threading.Lock()

    def claim(self, key: str) -> bool:
        """Tell whether nobody else is building it, or whoever was has died."""
        if (self._folder / f"{key}.batch").exists():
            return False
        claim = _lock(self._folder / f"{key}.claim", fcntl.LOCK_EX | fcntl.LOCK_NB)
        if claim is None:
            return False
        with self._guard:
            self._claims[key] = claim
        if (self._folder / f"{key}.batch").exists():  # posted, and the claim given back, a moment ago
            self.release(key)
            return False
        return True

    def post(self, key: str, finished: Finished) -> None:
        """Write a batch where the others find it; without room for it they build their own."""
        path = self._folder / f"{key}.batch"
        try:
            size = _write(path, finished.result)
        except (OSError, WorkerError):
            path.with_suffix(".new").unlink(missing_ok=True)
            self.release(key)
            return
        with self._guard:
            self._posted.append((key, time.monotonic(), size))
            self._remove_old()
        self.release(key)

    def release(self, key: str) -> None:
        with self._guard:
            claim = self._claims.pop(key, None)
        if claim is not None:
            (self._folder / f"{key}.claim").unlink(missing_ok=True)
            os.close(claim)

    def look(self, key: str) -> _Found:
        """Return the batch, once whoever claimed it has written it."""
        path = self._folder / f"{key}.batch"
        try:
            delivery = _read(path)
        except FileNotFoundError:
            claim = _lock(self._folder / f"{key}.claim", fcntl.LOCK_EX | fcntl.LOCK_NB, flags=os.O_RDWR)
            if claim is None:
                return "wait" if (self._folder / f"{key}.claim").exists() or path.exists() else "gone"
            os.close(claim)
            return "gone"
        self._took(path)
        return delivery

    def close(self) -> None:
        """Leave; whoever leaves last removes the folder."""
        for key in list(self._claims):
            self.release(key)
        if self._member is not None:
            os.close(self._member)
            self._member = None
        with _alone(self._folder.parent):
            _remove_if_dead(self._folder)

    def _took(self, path: Path) -> None:
        """Count a reader; the last one removes the batch, of which its mapping keeps the memory."""
        counter = path.with_suffix(".taken")
        with contextlib.suppress(OSError), counter.open("ab") as file:
            file.write(b".")
            file.flush()
            if file.tell() >= self._others:
                path.unlink(missing_ok=True)
                counter.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        now = time.monotonic()
        while self._posted and (
            now - self._posted[0][1] > _KEPT_S or sum(size for *_, size in self._posted) > _KEPT_BYTES
        ):
            key, *_ = self._posted.popleft()
            for suffix in ("batch", "taken"):
                (self._folder / f"{key}.{suffix}").unlink(missing_ok=True)


def _lock(path: Path, how: int, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """Return a locked file; None: another process has locked it, or it is not there."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def _alone(boards: Path) -> Iterator[None]:
    """Join or leave while nobody else does: a board that is being joined has no member yet."""
    folder = os.open(boards, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _remove_if_dead(folder: Path) -> None:
    """Remove a board that no living process is a member of."""
    lock = _lock(folder / "members", fcntl.LOCK_EX | fcntl.LOCK_NB, flags=os.O_RDWR)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _write(path: Path, value: Any) -> int:
    """Write a value; return how many bytes it took."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        for part in join(pack(value)):
            file.write(part)
        size = file.tell()
    new.replace(path)  # nobody sees half of it
    return size


def _read(path: Path) -> Delivery:
    """Return what was written, in the same memory; what a trainer changes in it is copied then, page by page."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    text, buffers = split(np.frombuffer(pages, np.uint8))  # a file of this user's, in a folder of their own
    delivery: Delivery = unpack(text, buffers, copies=False)
    return delivery
