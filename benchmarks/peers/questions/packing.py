"""Fill of packs, padding without them, and how equal the ranks' steps are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers.job import Job, Numbers, opening_of
from benchmarks.peers.lengths import costs_of, make_planner, sample_of_length
from benchmarks.peers.questions import Prices, Question, Results, Row, each
from benchmarks.peers.work import CAPACITY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.peers.loaders.base import Loader
    from benchmarks.peers.suite import Suite

_MICRO = 8
_HOOKED = 1000
_PER_SHARD = 400


def fill(loader: Loader, job: Job) -> Numbers:
    """Pack an epoch of lengths; also pad batches of 8 samples, as they come."""
    if loader.name == "vlm_stream":
        from vlm_stream.plan import StepShape, plan_report

        return {"fill": plan_report(make_planner(job["total"]), StepShape(world_size=1)).fill}
    packs = [pack["lengths"] for pack in _open(loader, job)]
    lengths = [length for pack in packs for length in pack]
    batches = [lengths[begin : begin + 8] for begin in range(0, len(lengths) - 7, 8)]
    used = sum(map(sum, batches)) / sum(len(batch) * max(batch) for batch in batches)
    return {"fill": sum(lengths) / (len(packs) * CAPACITY), "padding": 1 - used}


def balance(loader: Loader, job: Job) -> Numbers:
    """Largest over mean cost of the ranks in a step of 8 packs each."""
    if "ranks" in loader.cannot:
        return {"cannot": loader.cannot["ranks"]}
    ranks = job["ranks"]
    if loader.name == "vlm_stream":
        from vlm_stream.plan import StepShape, plan_report

        shape = StepShape(world_size=ranks, micro_batches=_MICRO)
        # Without the last step, which is not full: it is left out for all loaders.
        steps = plan_report(make_planner(job["total"]), shape).steps - 1
        report = plan_report(make_planner(job["total"]), shape, max_steps=max(1, steps))
        return {"llm": report.llm_imbalance_step, "vit": report.vit_imbalance_step, "steps": steps}
    costs = costs_of(job["total"])  # [sample, kind]
    loads: list[list[Any]] = []
    for rank in range(ranks):
        run = _open(loader, job, rank=rank, world_size=ranks)
        packs = [costs[[int(key) for key in pack["keys"]]].sum(axis=0) for pack in run]
        loads.append([sum(packs[at : at + _MICRO]) for at in range(0, len(packs) - _MICRO + 1, _MICRO)])
        run.close()
    steps = min(map(len, loads))
    if not steps:
        return {"cannot": "an epoch has less than a step for every rank"}
    ratios = [[max(kind) * ranks / sum(kind) for kind in zip(*row, strict=True)] for row in zip(*loads, strict=False)]
    llm, vit = (sum(kind) / len(kind) for kind in zip(*ratios, strict=True))
    return {"llm": llm, "vit": vit, "steps": steps}


def _open(loader: Loader, job: Job, **more: Any) -> Any:
    return loader.packs(opening_of(job, transform=sample_of_length, hooked=_HOOKED, **more), CAPACITY)


def measure(suite: Suite) -> Results:
    """7. Samples that are only lengths."""
    total = suite.scale.lengths
    folders = {name: str(suite.written(name, str(total), _PER_SHARD)) for name in suite.loaders if name != "vlm_stream"}
    common = {"total": total, "shuffle": 1000, "batch_size": 64}

    def one(do: str, **more: Any) -> Results:
        return {name: suite.job(name, do, where=folders.get(name, ""), **common, **more) for name in suite.loaders}

    return {"fill": one("packing.fill")} | {
        str(ranks): one("packing.balance", ranks=ranks) for ranks in suite.scale.ranks
    }


def _rows(found: Results, _all: Results, _prices: Prices) -> Iterable[Row]:
    title = "fill of packs of 8,192"
    yield Row(title, each(found["fill"], lambda run: f"{run['fill']:.1%}"), title)
    padding = {name: run for name, run in found["fill"].items() if "padding" in run or "error" in run}
    yield Row("without packs: padding in batches of 8", each(padding, lambda run: f"{run['padding']:.0%}"))
    for ranks in [name for name in found if name != "fill"]:
        cells = each(found[ranks], lambda run: f"{run['llm']:.3f} / {run['vit']:.3f}")
        short = f"the busiest of {ranks} ranks / mean, LLM / ViT" if ranks == max(found, key=_number) else ""
        yield Row(f"the busiest of {ranks} ranks / mean, LLM / ViT", cells, short)


def _number(name: str) -> int:
    return int(name) if name.isdigit() else 0


PACKING = Question(
    "How full are packs, and for how long do ranks wait for the busiest one?",
    "Here packs are made by best fit over a window of 4,096 lengths, before anything is fetched, and dealt to ranks "
    "so that language and vision work are equal in each step. Energon's hooks pack 1,000 samples at a time, which "
    "it holds. By hand, samples are packed as they come, and a rank gets what its shards hold.",
    measure,
    _rows,
)
