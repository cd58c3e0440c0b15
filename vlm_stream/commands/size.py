"""size: how many cores a training needs, from a short measurement on your data and this machine.

Some batches are built in this process, on one core; the index tells what the others cost beside them. Cores are those
of builders: workers on the trainers' nodes, or machines of a Ray cluster. A core here should be like a core there.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from vlm_stream.commands import arguments, output
from vlm_stream.commands.plan import BUSY
from vlm_stream.errors import ConfigError
from vlm_stream.schema import human_bytes
from vlm_stream.world import num_cores

if TYPE_CHECKING:
    from vlm_stream.blueprint import Work
    from vlm_stream.dispatch import CostModel
    from vlm_stream.planning import Plan

EXAMPLES: Final = """\
examples:
  size recipe.yaml --step-seconds 3.5 --gpus 64
  size shards/ --processor Qwen/Qwen2.5-VL-3B-Instruct --pack-size 8192 --step-seconds 2 --gpus 8 --gpus-per-node 8
  size recipe.yaml --step-seconds 3.5 --gpus 256 --world 64 --seconds 120 --json
"""
_MIN_BATCHES: Final = 3
_MOST_LOOKED_AT: Final = 1000
"""Batches of which the index tells the cost."""
_LINE_S: Final = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_stream_arguments(parser)
    parser.add_argument(
        "--step-seconds",
        type=float,
        required=True,
        metavar="T",
        help="how long the trainer takes for an optimizer step",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs of the run; --world: data-parallel ranks"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (default: 8)")
    parser.add_argument(
        "--seconds",
        type=arguments.parse_duration,
        default=30.0,
        metavar="S",
        help="how long to measure (default: 30)",
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, look at the plan, and print what is needed."""
    given = arguments.loader_arguments(args)
    arguments.need_processor(given)
    if not args.step_seconds > 0 or args.gpus < 1 or args.gpus_per_node < 1:
        raise ConfigError("--step-seconds, --gpus and --gpus-per-node are above 0, or there is nothing to be sized")
    plan, options = arguments.open_plan(given)
    world = args.world or args.gpus
    measured = _measure(plan, args.seconds, quiet=args.json or args.quiet)
    needed = _needed(measured, world, options.micro_batches, args)
    if args.json:
        output.print_json(needed)
    else:
        output.print_table("size", _rows(needed, args))
    return 0


@dataclass(slots=True)
class _Measured:
    """Batches of one rank that were built, and the work of these and of further ones."""

    model: CostModel
    works: list[Work] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    memory: int = 0
    """Of this process, with all that a builder needs."""

    def batch_seconds(self) -> tuple[float, float]:
        """Return core-seconds of the mean batch, and half of the range in which they are with 95 %.

        What was measured says by how much the model is off, the index how the mean batch differs from those measured.
        """
        expected = np.array([self.model.core_seconds(work) for work in self.works])  # [looked at]
        taken, of_taken = np.array(self.cpu_s), expected[: len(self.cpu_s)]  # [built]
        ratio = taken.sum() / max(of_taken.sum(), 1e-9)
        error = np.std(taken - ratio * of_taken, ddof=1) / math.sqrt(len(taken)) / max(of_taken.mean(), 1e-9)
        return float(ratio * expected.mean()), float(1.96 * error * expected.mean())


def _measure(plan: Plan, seconds: float, *, quiet: bool) -> _Measured:
    """Build batches for so many seconds; of further ones look at the index alone.

    They are those of one rank alone: more ranks share the same samples out more evenly.
    """
    import torch

    from vlm_stream.allocator import resident_bytes
    from vlm_stream.dispatch import CostModel, build_inline
    from vlm_stream.world import World

    torch.set_num_threads(1)  # as in a worker
    rank, options = World(0, 1), plan.build.options
    found = _Measured(CostModel())
    begin = shown = time.monotonic()
    before_s = time.process_time()
    built = build_inline(plan.blueprints(rank), plan.build, options.prefetch_bytes)
    with closing(built):
        for planned, delivery in built:
            now, cpu_s = time.monotonic(), time.process_time()
            found.cpu_s.append(cpu_s - before_s)
            found.num_tokens += delivery.num_tokens
            found.model.learn(planned.blueprint.work, delivery.seconds, delivery.num_bytes)
            if not quiet and now - shown > _LINE_S:
                shown = now
                sys.stderr.write(f"size: {len(found.cpu_s)} batches in {now - begin:.0f} of {seconds:.0f} s\n")
            if now - begin > seconds and len(found.cpu_s) > _MIN_BATCHES:
                break
            before_s = time.process_time()
    del found.cpu_s[:1]  # it loaded the processor
    if len(found.cpu_s) < _MIN_BATCHES:
        raise ConfigError(
            f"the data make {len(found.cpu_s) + 1} batches, and {_MIN_BATCHES + 1} are needed to say what one costs; "
            f"measure more epochs (--set epochs=4)"
        )
    found.memory = resident_bytes()
    num_looked_at = max(_MOST_LOOKED_AT, len(found.cpu_s)) + 1
    found.works = [planned.blueprint.work for planned in islice(plan.blueprints(rank), 1, num_looked_at)]
    return found


def _needed(found: _Measured, world: int, micro_batches: int, args: argparse.Namespace) -> dict[str, float]:
    """Return what the run needs, as numbers."""
    batch_s, error_s = found.batch_seconds()
    batches_per_step = world * micro_batches
    cores = batch_s * batches_per_step / args.step_seconds / BUSY
    num_built = len(found.cpu_s) + 1
    tokens_per_batch = found.num_tokens / num_built
    bytes_per_batch = float(np.mean([work.num_bytes for work in found.works]))
    return {
        "batches_measured": num_built,
        "core_seconds_per_batch": batch_s,
        "error": error_s / batch_s,
        "core_seconds_per_step": batch_s * batches_per_step,
        "cores": math.ceil(cores),
        "cores_per_gpu": cores / args.gpus,
        "cores_per_node": cores / args.gpus * min(args.gpus_per_node, args.gpus),
        "workers_per_rank": math.ceil(cores / world),
        "gpus_of_this_machine": num_cores() / (cores / args.gpus),
        "bytes_per_second": bytes_per_batch * batches_per_step / args.step_seconds,
        "memory_of_a_builder": found.memory,
        "core_hours_per_billion_tokens": batch_s / tokens_per_batch * 1e9 / 3600,
        "bytes_per_billion_tokens": bytes_per_batch / tokens_per_batch * 1e9,
    }


def _rows(needed: dict[str, float], args: argparse.Namespace) -> dict[str, str]:
    """Return the lines of the table, the answer first."""
    return {
        f"cores for steps of {args.step_seconds:g} s on {args.gpus:,} GPU{'s' if args.gpus > 1 else ''}": (
            f"{needed['cores']:,.0f} (±{needed['error']:.0%}), {BUSY:.0%} busy"
        ),
        f"cores of each node of {min(args.gpus_per_node, args.gpus)} GPUs": f"{needed['cores_per_node']:,.1f}",
        "workers of each rank (num_workers)": f"{needed['workers_per_rank']:,.0f}",
        f"GPUs that a machine like this one feeds ({num_cores()} cores)": f"{needed['gpus_of_this_machine']:,.1f}",
        "core-seconds of a step": f"{needed['core_seconds_per_step']:,.2f}",
        "core-seconds of a batch": f"{needed['core_seconds_per_batch']:.3f} ({needed['batches_measured']:,} measured)",
        "bytes from the store, all ranks": f"{human_bytes(needed['bytes_per_second'])}/s",
        "memory of a builder": human_bytes(needed["memory_of_a_builder"]),
        "for a billion tokens": (
            f"{needed['core_hours_per_billion_tokens']:,.1f} core-hours, "
            f"{human_bytes(needed['bytes_per_billion_tokens'])} read"
        ),
    }
