"""One measurement of one loader, in a process of its own: the job on standard input, numbers on standard output.

A question's module says what is done, in functions that take the loader and the job. One that a loader fails at gives
`{"error": ...}`; one that it has no way to do, `{"cannot": ...}`.
"""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.peers.loaders.base import Opening
from benchmarks.peers.tree import CpuMeter

if TYPE_CHECKING:
    from benchmarks.peers.loaders.base import Loader, Run

__all__ = ["Job", "Numbers", "in_a_line", "measure_packs", "opening_of"]

Job = dict[str, Any]
Numbers = dict[str, Any]


def opening_of(job: Job, **more: Any) -> Opening:
    """Return how the job wants its loader opened."""
    return Opening(**({name: job[name] for name in Opening.__dataclass_fields__ if name in job} | more))


def measure_packs(
    packs: Run, *, warm_s: float = 0.0, window_s: float = float("inf"), step_s_per_token: float = 0.0
) -> Numbers:
    """Take packs, as a trainer that needs so long for a token; count from the first one, or some seconds after it.

    Args:
        packs: A loader at work.
        warm_s: Seconds from the first pack to the beginning of the window.
        window_s: How long to count; without an end, to the end of the epoch.
        step_s_per_token: How long the trainer sleeps.
    """
    samples: list[tuple[str, int]] = []
    num_packs = tokens = 0
    waited = arrived = began = now = 0.0
    meter = CpuMeter()
    cpu = spent = 0.0
    asked = time.perf_counter()
    for pack in packs:
        now, spent = time.perf_counter(), meter.seconds()
        arrived = arrived or now
        num_packs += 1
        samples += zip(pack["keys"], pack["lengths"], strict=True)
        length = sum(pack["lengths"])
        if began:
            tokens += length
            waited += now - asked
            if now - began >= window_s:
                break
        elif now - arrived >= warm_s:
            began, cpu = now, spent
        time.sleep(length * step_s_per_token)
        asked = time.perf_counter()
    if not tokens:
        return {"error": f"{num_packs} packs came, too few for a rate"}
    numbers = {"tokens": tokens, "seconds": now - began, "cpu": spent - cpu, "waited": waited, "packs": num_packs}
    return numbers | {"all_tokens": sum(length for _, length in samples), "samples": samples}


def in_a_line(error: Exception) -> str:
    """Return what an error says in the end: those of workers carry their traceback in their text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"[:300]


def _do(loader: Loader, job: Job) -> Numbers:
    module = import_module(f"benchmarks.peers.questions.{job['module']}")
    try:
        return getattr(module, job["do"])(loader, job)  # type: ignore[no-any-return]
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"error": in_a_line(error)}


def main() -> None:
    """Run the job on standard input; its numbers are the last line of standard output."""
    import sys

    from benchmarks.peers.loaders import open_loader

    job = json.load(sys.stdin)
    print(json.dumps(_do(open_loader(job["loader"]), job)), flush=True)
    os._exit(0)  # some loaders leave threads behind


if __name__ == "__main__":
    main()
