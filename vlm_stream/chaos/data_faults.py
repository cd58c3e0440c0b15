"""What can happen to data: shards, servers, caches. Only copies and the proxy are touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.chaos.faults import Kind
from vlm_stream.chaos.proxy import Fault

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from vlm_stream.chaos.faults import Heal, Scene

_DAY_S: Final = 86_400.0
_CHANGED: Final = ("ChangedObjectError",)


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
