"""What can happen: to processes and states (kills, stops, limits), and to data (shards, servers, caches).

A kind of fault acts on a scene and may return how it is healed; it is then healed after some seconds, whether or not a
batch has come meanwhile. Signals go only to processes that descend from the trainers of this run, damage only to copies
and to what passes the proxy.
"""

import contextlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from vlm_stream.chaos.crew import Crew
from vlm_stream.chaos.proxy import Fault
from vlm_stream.chaos.stage import Stage

Heal = Callable[[], None]
KILLED: Final = "killed"
"""A trainer that is gone without a word."""
_CHANGED: Final = ("ChangedObjectError",)
_DAY_S: Final = 86_400.0


@dataclass(slots=True)
class Scene:
    """Where a fault acts."""

    stage: Stage
    crew: Crew
    draw: Random
    """Of this fault alone."""

    def builders(self) -> list[int]:
        """Return the process ids of builders that are alive."""
        family = _descendants(self.crew.pids)
        return [pid for pid in self.crew.builders if pid in family]

    def choose_builder(self) -> list[int]:
        """Return one of them, or none where all are being started."""
        return self._choose(self.builders())

    def choose_server(self) -> list[int]:
        """Return one of the fork servers, which stand between trainers and their builders, if there are any."""
        found = []
        for pid, parent in _parents().items():
            with contextlib.suppress(OSError):
                if parent in self.crew.pids and pid not in self.crew.builders:
                    found += [pid] * (b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return self._choose(sorted(found))

    def choose_trainer(self) -> list[int]:
        """Return one of the trainers."""
        return self._choose(self.crew.pids)

    def everybody(self) -> list[int]:
        """Return the trainers and all that descends from them."""
        return [*self.crew.pids, *_descendants(self.crew.pids)]

    def _choose(self, pids: list[int]) -> list[int]:
        return [self.draw.choice(pids)] if pids else []


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault."""

    name: str
    act: Callable[[Scene], Heal | None]
    weight: int = 1
    """How often it is drawn, against others."""
    seconds: tuple[float, float] = (0.1, 0.6)
    """How long it lasts."""
    damages: bool = False
    """Bytes may be wrong meanwhile: every batch is compared."""
    cuts_state: bool = False
    """The newest checkpoint must be refused."""
    ends: tuple[str, ...] = ()
    """How a trainer may end because of it: `KILLED`, or the name of an error with a sentence of ours. Any other end is
    not survived: a builder that dies must cost a rebuild, not the run."""


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _sends(number: signal.Signals, find: Callable[[Scene], list[int]]) -> Callable[[Scene], None]:
    """Return a fault that sends a signal to the processes that are found then."""
    return lambda scene: _signal(find(scene), number)


def _pauses(find: Callable[[Scene], list[int]]) -> Callable[[Scene], Heal]:
    """Return a fault that stops processes, and lets them go on if they are still there."""

    def act(scene: Scene) -> Heal:
        pids = find(scene)
        _signal(pids, signal.SIGSTOP)
        return lambda: _signal([pid for pid in pids if pid in scene.everybody()], signal.SIGCONT)

    return act


def _cut_state(scene: Scene) -> None:
    """Leave a part of the newest state of a rank, as a kill or a full disk in the middle of writing does."""
    path = scene.crew.newest[0]
    data = path.read_bytes()
    path.write_bytes(data[: scene.draw.randrange(len(data))])
    _signal(scene.crew.pids, signal.SIGKILL)


def _limit(which: int, find: Callable[[Scene, int], int]) -> Callable[[Scene], Heal]:
    """Return a fault that lowers a limit of all builders."""

    def act(scene: Scene) -> Heal:
        before: dict[int, tuple[int, int]] = {}
        for pid in scene.builders():
            with contextlib.suppress(OSError):
                soft, hard = before[pid] = resource.prlimit(pid, which)
                low = find(scene, pid)
                resource.prlimit(pid, which, (low if soft == resource.RLIM_INFINITY else min(low, soft), hard))

        def heal() -> None:
            family = _descendants(scene.crew.pids)
            for pid, limits in before.items():
                with contextlib.suppress(OSError):
                    if pid in family:
                        resource.prlimit(pid, which, limits)

        return heal

    return act


def _few_more(scene: Scene, pid: int) -> int:
    """Return how many descriptors a process has open, and some more."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir())) + scene.draw.randrange(6)


def _parents() -> Mapping[int, int]:
    """Return the parent of every process."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = (path / "stat").read_text(encoding="utf-8", errors="replace")
                found[int(path.name)] = int(text.rpartition(")")[2].split()[1])
    return found


def _descendants(ancestors: list[int]) -> set[int]:
    parents = _parents()
    found: set[int] = set()
    for pid in parents:
        above = pid
        while (above := parents.get(above, 0)) > 1:
            if above in ancestors:
                found.add(pid)
                break
    return found


PROCESS_KINDS: Final = {
    "trainers": (
        Kind("trainer: kill -9", _sends(signal.SIGKILL, Scene.choose_trainer), weight=2, ends=(KILLED,)),
        Kind("trainer: SIGSEGV", _sends(signal.SIGSEGV, Scene.choose_trainer), ends=(KILLED,)),
        Kind("all processes: kill -9", _sends(signal.SIGKILL, Scene.everybody), ends=(KILLED,)),
        Kind("trainer: stopped for a while", _pauses(Scene.choose_trainer), weight=4, seconds=(0.2, 1.5)),
        Kind("state: cut while it is written", _cut_state, cuts_state=True, ends=(KILLED, "StateError")),
    ),
    "builders": (
        Kind("builder: kill -9", _sends(signal.SIGKILL, Scene.choose_builder), weight=24),
        Kind("builder: SIGSEGV", _sends(signal.SIGSEGV, Scene.choose_builder), weight=12),
        Kind("builder: stopped for a while", _pauses(Scene.choose_builder), weight=12, seconds=(0.2, 2.0)),
        Kind("builder: stopped for good", _sends(signal.SIGSTOP, Scene.choose_builder), weight=3),
        Kind("all builders: kill -9", _sends(signal.SIGKILL, Scene.builders), weight=4),
        Kind("descriptors: few left", _limit(resource.RLIMIT_NOFILE, _few_more), weight=4, ends=("StorageError",)),
        Kind("files: cannot grow", _limit(resource.RLIMIT_FSIZE, lambda *_: 4096), weight=4),
    ),
    "servers": (Kind("builders' server: kill -9", _sends(signal.SIGKILL, Scene.choose_server), weight=2),),
}


def _damage(spoil: Callable[[bytearray, Random], bytes | None]) -> Callable[[Scene], Heal]:
    """Return a fault that replaces a shard by what `spoil` makes of it (None: nothing), and puts it back."""

    def act(scene: Scene) -> Heal:
        copy = scene.draw.choice(scene.stage.shards)
        new = spoil(bytearray(copy.original.read_bytes()), scene.draw)
        if new is None:
            copy.path.unlink()
        else:
            copy.path.write_bytes(new)  # in place: builders that have it open see it

        def heal() -> None:
            part = copy.path.with_suffix(".back")
            shutil.copyfile(copy.original, part)
            if copy.path.exists():
                copy.path.write_bytes(part.read_bytes())
            part.replace(copy.path)

        return heal

    return act


def _cut(data: bytearray, draw: Random) -> bytes:
    return bytes(data[: draw.randrange(len(data))])


def _flip(data: bytearray, draw: Random) -> bytes:
    for _ in range(20):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def _replace(data: bytearray, draw: Random) -> bytes:
    """Return another shard of the same length."""
    at = draw.randrange(1, len(data))
    return bytes(data[at:] + data[:at])


def _lengthen(data: bytearray, draw: Random) -> bytes:
    """Return a longer shard: that of another version of the dataset."""
    return bytes(data[:512] + draw.randbytes(1024) + data[512:])


def _answers(share: float, **fault: Any) -> Callable[[Scene], Heal]:
    """Return a fault that spoils a share of a server's answers."""

    def act(scene: Scene) -> Heal:
        proxy, draw = scene.stage.proxy, scene.draw
        assert proxy is not None  # noqa: S101 - the kinds of a server are drawn where there is one

        def choose(_number: int, _method: str, _path: str) -> Fault | None:
            if draw.random() >= share:
                return None
            return Fault(**{"at": draw.randrange(20_000), **fault})

        proxy.faults = choose

        def heal() -> None:
            proxy.faults = []

        return heal

    return act


def _refuse(scene: Scene) -> Heal:
    proxy = scene.stage.proxy
    assert proxy is not None  # noqa: S101 - likewise
    stack = contextlib.ExitStack()
    stack.enter_context(proxy.refusing())
    return stack.close


def _remove_cache(scene: Scene) -> None:
    shutil.rmtree(str(scene.stage.cache), ignore_errors=True)


def _block_cache(scene: Scene) -> Heal:
    """Let nothing be made where the cache is, also for root, whom no mode stops: a file stands there."""
    cache = scene.stage.cache
    assert cache is not None  # noqa: S101 - likewise
    aside = cache.with_name("cache-aside")
    shutil.rmtree(aside, ignore_errors=True)
    if cache.exists():
        cache.rename(aside)
    cache.write_bytes(b"")

    def heal() -> None:
        cache.unlink()
        if aside.exists():
            aside.rename(cache)

    return heal


def _spoil_cache(scene: Scene) -> None:
    """Flip bytes of shards in the cache."""
    for path in _cached(scene):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            at = scene.draw.randrange(max(path.stat().st_size, 1))
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0xFF]) if byte else b"")


def _move_clock(scene: Scene) -> None:
    """Let the cache's files be a day from the past or the future, as they are when the clock has jumped."""
    moment = time.time() + scene.draw.choice((-_DAY_S, _DAY_S))
    for path in _cached(scene):
        with contextlib.suppress(OSError):
            os.utime(path, (moment, moment))


def _cached(scene: Scene) -> list[Any]:
    cache = scene.stage.cache
    return [path for path in cache.rglob("*") if path.is_file()] if cache is not None and cache.is_dir() else []


DATA_KINDS: Final = {
    "shards": (
        Kind("shard: deleted and put back", _damage(lambda *_: None), weight=4, damages=True),
        Kind("shard: cut and put back", _damage(_cut), weight=4, damages=True),
        Kind("shard: flipped bytes", _damage(_flip), weight=4, damages=True),
        Kind("shard: replaced, same length", _damage(_replace), weight=4, damages=True),
        Kind("shard: replaced, other length", _damage(_lengthen), damages=True, ends=_CHANGED),
    ),
    "server": (
        Kind("server: 503 storm", _answers(0.8, kind="status", status=503), weight=6),
        Kind("server: 429 storm", _answers(0.8, kind="status", status=429), weight=6),
        Kind("server: 500s", _answers(0.5, kind="status", status=500), weight=6),
        Kind("server: resets", _answers(0.5, kind="reset"), weight=6),
        Kind("server: cut bodies", _answers(0.5, kind="cut"), weight=6, damages=True),
        Kind("server: wrong lengths", _answers(0.3, kind="length"), weight=4, damages=True),
        Kind("server: flipped bytes", _answers(0.5, kind="flip"), weight=6, damages=True),
        Kind("server: stale objects", _answers(0.5, kind="stale"), weight=4, damages=True, ends=_CHANGED),
        Kind("server: slow bodies", _answers(0.5, kind="slow", seconds=0.02), weight=6),
        Kind("server: stalled bodies", _answers(0.2, kind="stall", seconds=3.0), weight=2),
        Kind("server: credentials expired", _answers(1.0, kind="status", status=403), weight=4, ends=("AccessError",)),
        Kind("server: down", _refuse, weight=4, seconds=(0.3, 3.0)),
    ),
    "cache": (
        Kind("cache: gone", _remove_cache, weight=4),
        Kind("cache: cannot be written", _block_cache, weight=4),
        Kind("cache: flipped bytes", _spoil_cache, weight=4, damages=True),
        Kind("cache: clock jumps a day", _move_clock, weight=4),
    ),
}
