"""Faults: a worker that is killed, a damaged shard."""

from __future__ import annotations

import os
import shutil
import signal
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.damage import damage_header, flip_payload_byte
from benchmarks.peers.job import Job, Numbers, in_a_line, opening_of
from benchmarks.peers.questions import Prices, Question, Results, Row, each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.peers.loaders.base import Loader
    from benchmarks.peers.suite import Suite

_BEFORE = 10
_SILENT_S = 30
"""Without a batch for so long, a loader hangs."""


def kill(loader: Loader, job: Job) -> Numbers:
    """Kill a worker behind some batches; see what else comes."""
    keys: list[str] = []
    numbers: Numbers = {"killed": 0}
    signal.signal(signal.SIGALRM, _hangs)
    run = loader.open(opening_of(job, transform=_key))
    try:
        for number, batch in enumerate(run, start=1):
            signal.alarm(_SILENT_S)
            keys.extend(batch)
            if number == _BEFORE:
                for pid in run.worker_pids()[:1]:
                    os.kill(pid, signal.SIGKILL)
                    numbers["killed"] = 1
            if len(keys) > 2 * job["total"]:  # it goes round and round
                break
    except Exception as error:
        numbers["died"] = in_a_line(error)
    signal.alarm(0)
    lost = job["total"] - len(set(keys))
    return numbers | {"lost": lost, "repeated": len(keys) - len(set(keys))}


def _hangs(_number: int, _frame: Any) -> None:
    raise TimeoutError(f"no batch for {_SILENT_S} s")


def damage(loader: Loader, job: Job) -> Numbers:
    """Read a dataset of which one place is damaged: what comes, what comes wrong, what is said."""
    from benchmarks.peers.data import read_raw

    if job["kind"] in loader.cannot:
        return {"cannot": loader.cannot[job["kind"]]}
    expected = {int(record.key): _checksum(record.members()) for record in read_raw(Path(job["raw"]))}
    run = loader.open(opening_of(job, transform=_key_and_checksum))
    seen: dict[int, int] = {}
    error = None
    try:
        for batch in run:
            seen.update(batch)
    except Exception as caught:
        error = in_a_line(caught).replace(job["where"], "data")
    return {
        "lost": len(expected.keys() - seen.keys()),
        "wrong": sum(checksum != expected.get(key) for key, checksum in seen.items()),
        "died": error,
        "said": [note.replace(job["where"], "data") for note in run.notes()],
    }


def _checksum(members: dict[str, Any]) -> int:
    """Return a checksum of the media. Text may be written in another form, and a picture that comes twice only once."""
    media = [content for name, content in members.items() if not name.startswith("__") and name != "json"]
    return sum({zlib.crc32(content) for content in media})


def _key(members: dict[str, Any]) -> str:
    return str(members["__key__"])


def _key_and_checksum(members: dict[str, Any]) -> tuple[int, int]:
    return int(members["__key__"]), _checksum(members)


def measure(suite: Suite) -> Results:
    """8. A killed worker; one damaged header; one flipped byte."""
    from benchmarks.peers.loaders import open_loader

    total = suite.scale.epoch_images * 5
    small, raw = suite.raw("small", total), suite.raw("images", suite.scale.epoch_images)
    found: Results = {"kill": {}, "header": {}, "byte": {}}
    for name in suite.loaders:
        where = str(suite.written(name, small, 50))
        found["kill"][name] = suite.job(name, "faults.kill", where=where, workers=2, batch_size=8, total=total)
        whole = suite.written(name, raw, 50)
        for kind, harm in (("header", damage_header), ("byte", flip_payload_byte)):
            if kind in (loader := open_loader(name)).cannot:
                found[kind][name] = {"cannot": loader.cannot[kind]}
                continue
            copy = suite.data / "damaged"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            try:
                harm(copy, loader.files)
            except ValueError as error:
                found[kind][name] = {"cannot": str(error).replace(str(copy), "data")}
                continue
            found[kind][name] = suite.job(name, "faults.damage", where=str(copy), raw=str(raw), kind=kind)
    return found


def _after_kill(run: Numbers) -> str:
    words = [f"{run['lost']} lost", *[f"{run['repeated']} repeated"] * bool(run["repeated"])]
    return ", ".join([*words, "dies" if run.get("died") else "goes on" if run.get("killed") else "nobody to kill"])


def _after_damage(run: Numbers) -> str:
    words = [f"{run['lost']} lost"]
    words += [f"{run['wrong']} wrong"] * bool(run["wrong"])
    words += ["dies"] * bool(run["died"])
    words += ["named"] * bool(run["said"])
    words += ["unnoticed"] * bool((run["lost"] or run["wrong"]) and not run["died"] and not run["said"])
    return ", ".join(words)


def _rows(found: Results, _all: Results, _prices: Prices) -> Iterable[Row]:
    yield Row("a worker is killed", each(found["kill"], _after_kill), "a worker is killed")
    yield Row("one damaged header", each(found["header"], _after_damage), "one damaged header")
    yield Row("one flipped byte of a picture", each(found["byte"], _after_damage), "one flipped byte of a picture")


FAULTS = Question(
    "What if a worker is killed, or a shard is damaged?",
    "Here a dead worker's batches are built by another one, and checksums of every sample are in the index, so that a "
    "bad one is left out and named. Torch's `DataLoader` ends the run with its worker; Ray starts the task again. "
    "Without checksums a flipped byte is trained on, and a damaged header costs the rest of the shard or the run.",
    measure,
    _rows,
)
