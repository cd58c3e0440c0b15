"""where: which samples a step holds, or at which step a sample comes. Nothing is read but indexes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from vlm_stream.format import Drawn
    from vlm_stream.plan import PlannedSample
    from vlm_stream.planning import Plan

EXAMPLES: Final = """\
examples:
  where shards/ --config recipe.yaml --world 64 --step 41200 --rank 13
  where shards/ --pack-size 8192 --key 000000512
  where shards/ --pack-size 8192 --key s1894
  where --config recipe.yaml --world 8 --state checkpoint.pt --step 1200 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_stream_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="name the samples of this step")
    what.add_argument("--key", metavar="K", help="find the next delivery of the samples with this key or id")
    parser.add_argument("--rank", type=int, metavar="R", help="of this rank alone")
    arguments.add_state_argument(parser)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer; exit code 1 when a key is not delivered any more."""
    from vlm_stream.plan import find_samples, samples_of_step

    plan, options = arguments.open_plan(arguments.loader_arguments(args))
    state, epochs_before = arguments.read_saved_state(args.state, options)
    plan = plan.after(epochs_before)
    shape = options.shape(args.world or 1)
    if args.rank is not None and not 0 <= args.rank < shape.world_size:
        raise ConfigError(
            f"there is no rank {args.rank} among {shape.world_size}, so no sample goes to it; ranks count from 0, and "
            f"--world says how many there are"
        )
    refs = [] if args.key is None else plan.datasets.find(args.key)
    if args.key is None:
        found = samples_of_step(plan.planner, shape, args.step, rank=args.rank, state=state)
    else:
        found = find_samples(plan.planner, shape, refs, state=state)
    drawn = plan.datasets.draw([sample.ref for sample in found])
    lines = [_line(*pair, plan) for pair in zip(found, drawn, strict=True)]
    if args.key is not None:
        lines = [line | {"found_by": "key" if line["key"] == args.key else "id"} for line in lines]
    num_lost = max(len(refs) - len(found), 0)
    if args.json:
        output.print_json({"samples": lines, "not_delivered": num_lost})
    else:
        _print(lines, num_lost)
    return 0 if lines else 1


def _line(sample: PlannedSample, drawn: Drawn, plan: Plan) -> dict[str, Any]:
    line = sample._asdict()
    source = plan.datasets.sources[line.pop("ref").source].name
    return line | {
        "source": source,
        "entry": drawn.entry,
        "shard": drawn.span.path,
        "offset": drawn.span.offset,
        "key": drawn.key,
        "id": drawn.id,
    }


def _print(lines: list[dict[str, Any]], num_lost: int) -> None:
    if lines:
        names = [name for name in lines[0] if name != "offset"]
        rows = [["" if line[name] is None else str(line[name]) for name in names] for line in lines]
        output.print_columns([name.replace("_", " ") for name in names], *rows)
    if num_lost or not lines:
        lost = f"{num_lost} of that name: not delivered any more" if lines else "not delivered any more"
        output.say(lost)
