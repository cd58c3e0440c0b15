"""Resume: stop two ranks late in an epoch of packs, go on with as many, fewer and more."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.job import Job, Numbers, opening_of
from benchmarks.peers.lengths import mean_packs, sample_of_length
from benchmarks.peers.questions import Prices, Question, Results, Row, each
from benchmarks.peers.work import CAPACITY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.peers.loaders.base import Loader, Opening
    from benchmarks.peers.suite import Suite

_RANKS = 2
_SHARE = 0.9
_GOING_ON = (2, 1, 3)
_HOOKED = 1000
_LATEST = 3


def stop(loader: Loader, job: Job) -> Numbers:
    """Take so many packs and save the state."""
    run = loader.packs(_opening(job), CAPACITY)
    keys: list[str] = []
    for number, pack in enumerate(run, start=1):
        keys += pack["keys"]
        if number == job["packs"]:
            break
    state = run.state()
    Path(job["state"]).write_bytes(state)
    run.close()
    return {"keys": keys, "state_bytes": len(state)}


def resume(loader: Loader, job: Job) -> Numbers:
    """Go on from the states, in a new process with all imported: seconds to the third pack, what comes.

    The first ones may be of samples that were saved.
    """
    next(iter(loader.open(opening_of(job | {"workers": 0, "rank": 0, "world_size": 1}))))
    states = [Path(file).read_bytes() for file in job["states"]]
    begin, seconds = time.perf_counter(), 0.0
    keys: list[str] = []
    for number, pack in enumerate(loader.packs(_opening(job), CAPACITY, states), start=1):
        if number <= _LATEST:
            seconds = time.perf_counter() - begin
        keys += pack["keys"]
        if len(keys) >= job["total"]:  # it goes round and round
            break
    return {"keys": keys, "seconds": seconds}


def _opening(job: Job) -> Opening:
    return opening_of(job, transform=sample_of_length, hooked=_HOOKED)


def measure(suite: Suite) -> Results:
    """6. Both ranks stop at the same step, as training does, behind 90 % of the packs."""
    from benchmarks.peers.loaders import open_loader

    found: Results = {}
    total = suite.scale.lengths // 4
    for name in suite.loaders:
        cannot = open_loader(name).cannot
        if "state" in cannot:
            found[name] = {str(world): {"cannot": cannot["state"]} for world in _GOING_ON}
            continue
        where = str(suite.written(name, str(total), 100))
        common = {"where": where, "shuffle": 1000, "seed": 5, "workers": 2, "batch_size": 4, "total": total}
        # How full packs get decides how many an epoch has, and so where 90 % is.
        packed = name in ("vlm_stream", "energon")
        packs = int(mean_packs(total, packed=packed) * _SHARE / _RANKS)
        files = [str(suite.data / f"{name}-{rank}.state") for rank in range(_RANKS)]
        stopped = [
            suite.job(name, "resume.stop", packs=packs, state=file, rank=rank, world_size=_RANKS, **common)
            for rank, file in enumerate(files)
        ]
        found[name] = {}
        for world in _GOING_ON:
            if error := next((run["error"] for run in stopped if "error" in run), None):
                found[name][str(world)] = {"error": error}
            elif world != _RANKS and "world" in cannot:
                found[name][str(world)] = {"cannot": cannot["world"]}
            else:
                runs = [
                    suite.job(name, "resume.resume", states=files, rank=rank, world_size=world, **common)
                    for rank in range(world)
                ]
                found[name][str(world)] = _continuity(stopped, runs, total)
    return found


def _continuity(stopped: list[Numbers], runs: list[Numbers], total: int) -> Numbers:
    if error := next((run["error"] for run in runs if "error" in run), None):
        return {"error": error}
    keys = [key for run in [*stopped, *runs] for key in run["keys"]]
    return {
        "seconds": max(run["seconds"] for run in runs),
        "lost": total - len(set(keys)),
        "repeated": len(keys) - len(set(keys)),
        "state_bytes": sum(run["state_bytes"] for run in stopped),
    }


def _rows(found: Results, _all: Results, _prices: Prices) -> Iterable[Row]:
    def of(world: int, text: Any) -> dict[str, str]:
        return each({name: worlds[str(world)] for name, worlds in found.items()}, text)

    yield Row("2 ranks go on: third pack after so many s", of(2, lambda run: f"{run['seconds']:.2f}"))
    for world in _GOING_ON:
        short = "resume with 1 rank instead of 2: lost, repeated" if world == 1 else ""
        title = f"2 ranks -> {world}: samples lost, repeated"
        yield Row(title, of(world, lambda run: f"{run['lost']:,}, {run['repeated']:,}"), short)
    yield Row("bytes that are saved, both ranks", of(2, lambda run: f"{run['state_bytes']:,}"))


RESUME = Question(
    "What does a resume at 90 % of an epoch cost, and is anything lost or repeated?",
    "Here a state is a position in a plan of packs, which knows no world size. The others count samples of a rank: "
    "what was read and not yet packed must be saved beside it by the user, and ranks that pack by hand have taken "
    "different numbers of samples at the same step, of which a state that is one for all ranks knows nothing.",
    measure,
    _rows,
)
