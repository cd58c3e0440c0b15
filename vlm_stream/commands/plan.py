"""plan: the dry run, from the index alone. How full packs get, how many steps, how even the ranks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError
from vlm_stream.recipe import normalise_sources

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vlm_stream.format import Drawn
    from vlm_stream.plan import PlannedSample, PlanReport

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: Final = """\
examples:
  plan shards/ --pack-size 8192 --world 64 --micro-batches 4
  plan s3://bucket/data --pack-size 8192 --world 64 --sweep window=1024,4096,65536
  plan --config recipe.yaml --max-steps 200 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_stream_arguments(parser)
    parser.add_argument("--max-steps", type=int, metavar="N", help="look at the first N steps (default: an epoch)")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=A,B", help="one column for each value of an option"
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan once for each column and print the table."""
    given = arguments.loader_arguments(args)
    columns = _columns(args.sweep)
    reports = {title: _report(given | changes, args) for title, changes in columns.items()}
    if args.json:
        plain = {
            title: report.to_dict() | {"entries": entries.to_dict()} for title, (report, entries) in reports.items()
        }
        output.print_json(plain if args.sweep else next(iter(plain.values())))
    else:
        _print({title: _rows(report) | entries.rows() for title, (report, entries) in reports.items()})
    return 0


class _Entries:
    """Adds up what is drawn from each entry of each source, over the samples whose requests are counted."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Counter[str]] = {}

    def add(self, source: str, drawn: Drawn, tokens: int) -> None:
        sums = self._sums.setdefault((source, drawn.entry), Counter())
        sizes = drawn.sizes
        media = {"images": len(sizes.images), "videos": len(sizes.videos), "audios": len(sizes.audios)}
        sums.update(samples=1, tokens=tokens, **media)

    def to_dict(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return sums and shares by source and entry."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for (source, entry), sums in sorted(self._sums.items()):
            shares = {f"{name}_share": sums[name] / max(self._total(name), 1) for name in ("samples", "tokens")}
            found.setdefault(source, {})[entry] = {**sums, **shares}
        return found

    def _total(self, name: str) -> int:
        return sum(sums[name] for sums in self._sums.values())

    def rows(self) -> dict[str, str]:
        """Return a line of the table for each entry; sources are named where there are several."""
        several = len({source for source, _ in self._sums}) > 1
        return {
            f"from {f'{source}, ' if several and not source.endswith(f':{entry}') else ''}{entry}": (
                f"{sums['samples'] / self._total('samples'):.1%} of samples, "
                f"{sums['tokens'] / max(self._total('tokens'), 1):.1%} of tokens, "
                f"{sums['images']:,} images, {sums['videos']:,} videos, {sums['audios']:,} audios"
            )
            for (source, entry), sums in sorted(self._sums.items())
        }


def _columns(sweeps: list[str]) -> dict[str, dict[str, Any]]:
    import yaml

    columns: dict[str, dict[str, Any]] = {"plan": {}}
    for sweep in sweeps:
        name, equals, values = sweep.partition("=")
        if not equals or not values:
            raise ConfigError(f"'--sweep {sweep}' names no values, so there is nothing to compare; write NAME=A,B,C")
        key = name.strip().replace("-", "_")
        columns = {
            f"{'' if title == 'plan' else title + ' '}{key}={value}": changes | {key: yaml.safe_load(value)}
            for title, changes in columns.items()
            for value in values.split(",")
        }
    return columns


def _report(given: dict[str, Any], args: argparse.Namespace) -> tuple[PlanReport, _Entries]:
    from vlm_stream.plan import plan_report
    from vlm_stream.planning import open_plan
    from vlm_stream.processors import open_processor
    from vlm_stream.storage import plan_requests

    sources, processor, options = arguments.split_options(given)
    plan = open_plan(normalise_sources(sources), options, open_processor(processor))
    if args.max_steps is None and options.epochs is None:
        raise ConfigError("the plan has no end (epochs is null), so it cannot be added up; give --max-steps")

    entries = _Entries()

    def count_requests(samples: Sequence[PlannedSample]) -> tuple[int, int]:
        found = plan.datasets.draw([sample.ref for sample in samples])
        for sample, drawn in zip(samples, found, strict=True):
            entries.add(plan.datasets.sources[sample.ref.source].name, drawn, sample.tokens)
        requests = plan_requests([drawn.span for drawn in found], options.read())
        return len(requests), sum(request.size for request in requests)

    shape = options.shape(args.world or 1)
    report = plan_report(plan.planner, shape, max_steps=args.max_steps, count_requests=count_requests)
    return report, entries


def _print(columns: dict[str, dict[str, str]]) -> None:
    names = dict.fromkeys(name for rows in columns.values() for name in rows)
    output.print_columns(
        ["", *columns], *([name, *(rows.get(name, "") for rows in columns.values())] for name in names)
    )


def _rows(report: PlanReport) -> dict[str, str]:
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report.dropped.items()) or "none"
    mixture = ", ".join(
        f"{name} {count / max(report.tokens, 1):.1%}" for name, count in report.tokens_by_source.items()
    )
    return {
        "samples": f"{report.samples:,}",
        "tokens": f"{report.tokens:,}",
        "tokens by source": mixture,
        "dropped": dropped,
        "units (lower bound)": f"{report.packs:,} ({report.packs_lower_bound:,})",
        "fill / padding": f"{report.fill:.2%} / {report.padding:.2%}",
        "steps" if report.complete else "steps looked at": f"{report.steps:,}",
        "steps per epoch": f"{report.steps_per_epoch:,.0f}",
        "LLM max/mean, step / micro": f"{report.llm_imbalance_step:.3f} / {report.llm_imbalance_micro:.3f}",
        "ViT max/mean, step / micro": f"{report.vit_imbalance_step:.3f} / {report.vit_imbalance_micro:.3f}",
        "live shards": f"{report.live_shards:.0f}",
        "variance inflation": f"{report.variance_inflation:.2f}",
        "requests per sample": f"{report.requests_per_sample or 0:.2f}",
        "bytes per step": output.human_bytes(report.bytes_per_step or 0),
        "state": output.human_bytes(report.state_bytes),
    }
