"""where: which samples a step holds, or at which step a sample comes. Nothing is read but indexes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError, InputError
from vlm_stream.recipe import normalise_sources

if TYPE_CHECKING:
    import argparse

    from vlm_stream.plan import PlannedSample, Ref
    from vlm_stream.planning import Plan

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: Final = """\
examples:
  where shards/ --config recipe.yaml --world 64 --step 41200 --rank 13
  where shards/ --pack-size 8192 --key 000000512
  where --config recipe.yaml --world 8 --state checkpoint.pt --step 1200 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_stream_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="name the samples of this step")
    what.add_argument("--key", metavar="K", help="find the next delivery of the sample with this key")
    parser.add_argument("--rank", type=int, metavar="R", help="of this rank alone")
    arguments.add_state_argument(parser)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer; exit code 1 when a key is not delivered any more."""
    from vlm_stream.plan import find_sample, samples_of_step
    from vlm_stream.planning import open_plan
    from vlm_stream.processors import open_processor

    sources, processor, options = arguments.split_options(arguments.loader_arguments(args))
    state, epochs_before = arguments.read_saved_state(args.state, options)
    plan = open_plan(normalise_sources(sources), options, open_processor(processor)).after(epochs_before)
    shape = options.shape(args.world or 1)
    if args.rank is not None and not 0 <= args.rank < shape.world_size:
        raise ConfigError(
            f"there is no rank {args.rank} among {shape.world_size}, so no sample goes to it; ranks count from 0, and "
            f"--world says how many there are"
        )
    if args.step is not None:
        found = samples_of_step(plan.planner, shape, args.step, rank=args.rank, state=state)
    else:
        ref = _find_key(args.key, plan)
        delivery = find_sample(plan.planner, shape, ref, state=state)
        found = () if delivery is None else (delivery,)
    lines = [_line(delivery, plan) for delivery in found]
    if args.json:
        output.print_json({"samples": lines})
    else:
        _print(lines)
    return 0 if lines else 1


def _find_key(key: str, plan: Plan) -> Ref:
    from vlm_stream.plan import Ref

    for number, dataset in enumerate(plan.datasets.opened):
        for shard in range(len(dataset.manifest.shards)):
            row = dataset.find_key(shard, key)
            if row is not None:
                return Ref(number, shard, row)
    raise InputError(f"no source has a sample with the key '{key}'; keys are in the ledger, in refs and in the tars")


def _line(delivery: PlannedSample, plan: Plan) -> dict[str, Any]:
    from vlm_stream.plan import Ref

    source = next(n for n, spec in enumerate(plan.planner.sources) if spec.name == delivery.source)
    (drawn,) = plan.datasets.draw([Ref(source, delivery.shard, delivery.sample_row)])
    return delivery.to_dict() | {"shard": drawn.span.path, "key": drawn.key}


def _print(lines: list[dict[str, Any]]) -> None:
    from rich.table import Table

    names = ("step", "rank", "micro", "row", "place", "source", "shard", "key", "tokens")
    table = Table(*names)
    for line in lines:
        table.add_row(*(str(line[name]) for name in names))
    if lines:
        output.print_whole(table)
    else:
        output.open_console().print("not delivered any more")
