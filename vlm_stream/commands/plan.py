"""plan: the dry run, from the index alone. How full packs get, how many steps, how even the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError
from vlm_stream.recipe import normalise_sources

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vlm_stream.plan import PlanReport, Ref

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
        plain = {title: report.to_dict() for title, report in reports.items()}
        output.print_json(plain if args.sweep else next(iter(plain.values())))
    else:
        _print(reports)
    return 0


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


def _report(given: dict[str, Any], args: argparse.Namespace) -> PlanReport:
    from vlm_stream.plan import plan_report
    from vlm_stream.planning import open_plan
    from vlm_stream.processors import open_processor
    from vlm_stream.storage import plan_requests

    sources, processor, options = arguments.split_options(given)
    plan = open_plan(normalise_sources(sources), options, open_processor(processor))
    if args.max_steps is None and options.epochs is None:
        raise ConfigError("the plan has no end (epochs is null), so it cannot be added up; give --max-steps")

    def count_requests(refs: Sequence[Ref]) -> tuple[int, int]:
        requests = plan_requests([drawn.span for drawn in plan.datasets.draw(refs)], options.read())
        return len(requests), sum(request.size for request in requests)

    shape = options.shape(args.world or 1)
    return plan_report(plan.planner, shape, max_steps=args.max_steps, count_requests=count_requests)


def _print(reports: dict[str, PlanReport]) -> None:
    from rich.table import Table

    table = Table("", *reports)
    rows = {title: _rows(report) for title, report in reports.items()}
    for name in next(iter(rows.values())):
        table.add_row(name, *(row[name] for row in rows.values()))
    output.print_whole(table)


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
