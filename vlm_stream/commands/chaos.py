"""chaos: run a recipe in real trainer processes without a model, under faults drawn from a seed, and check every batch.

Builders and trainers are killed, stopped and crashed; copies of local shards are deleted, cut and replaced; a proxy
before the recipe's endpoint throttles, cuts, delays and alters answers. Trainers resume from their last checkpoint,
also with another number of ranks. Nothing of yours is written to. Exit code 1 when anything was lost, repeated or
silent.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from vlm_stream.chaos import Report, Row

EXAMPLES: Final = """\
examples:
  chaos recipe.yaml --minutes 10
  chaos recipe.yaml --minutes 60 --seed 7 --json
  chaos shards/ --processor Qwen/Qwen2.5-VL-3B-Instruct --pack-size 4096 --set num_workers=2 --only builder
"""
COLUMNS: Final = ("fault", "times", "survived", "resumed", "named", "lost", "repeated", "silent", "longest wait, s")
_SHOWN_NOTES: Final = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_stream_arguments(parser)
    told: dict[str, tuple[str, Callable[[str], int]]] = {
        "--seed": ("of the faults (default: 0); that of the order of samples is the recipe's", int),
        "--world": ("most ranks; each resume draws how many there are (default: 2)", arguments.parse_count),
    }
    for action in parser._actions:
        for flag in set(action.option_strings) & told.keys():
            action.help, action.type = told[flag]
    group = parser.add_argument_group("chaos")
    group.add_argument(
        "--minutes", type=arguments.parse_duration, default=3.0, metavar="N", help="how long (default: %(default)s)"
    )
    group.add_argument("--faults", type=arguments.parse_count, metavar="N", help="stop after so many faults")
    group.add_argument("--only", nargs="+", default=(), metavar="NAME", help="faults whose names begin like this")
    group.add_argument(
        "--patience",
        type=arguments.parse_duration,
        default=120.0,
        metavar="S",
        help="a longer step is a hang (default: %(default)s)",
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run, and print the table."""
    if sys.platform != "linux":
        raise ConfigError("chaos looks for processes in /proc, which only Linux has; run it there")
    from vlm_stream.chaos import ChaosOptions, run_chaos

    seed, args.seed = args.seed or 0, None
    found = arguments.loader_arguments(args)
    options = ChaosOptions(
        minutes=args.minutes,
        seed=seed,
        max_faults=args.faults,
        max_world=args.world or 2,
        patience_s=args.patience,
        only=tuple(args.only),
    )
    report = run_chaos(
        found, options, lambda line: None if args.quiet or args.json else output.say(f"chaos: {line}", stderr=True)
    )
    if args.json:
        output.print_json(report.to_dict())
    else:
        _print(report)
    return 0 if report.is_good else 1


def _print(report: Report) -> None:
    output.print_columns(COLUMNS, *(cells(row) for row in [*report.rows, report.total]))
    output.say(
        f"{report.batches} batches with {report.samples} samples were compared with the plan in {report.seconds:.0f} "
        f"s, {report.rounds} whole rounds among them. The same faults again: --seed {report.seed}"
    )
    for note in report.notes[:_SHOWN_NOTES]:
        output.say(f"  {note}")


def cells(row: Row) -> list[str]:
    """Return a row of the table as text."""
    numbers = (row.times, row.survived, row.resumed, row.named, row.lost, row.repeated, row.silent)
    return [row.fault, *map(str, numbers), f"{row.longest_wait_s:.1f}"]
