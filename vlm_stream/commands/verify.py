"""verify: every checksum, range and count of a dataset against its tars."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from vlm_stream.commands.common import (
    add_output_arguments,
    add_store_arguments,
    add_workers_argument,
    human_bytes,
    print_json,
    store_options,
)
from vlm_stream.commands.progress import Progress

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME: Final = "verify"
HELP: Final = "check every checksum, range and count of a dataset against its tars (exit 1 if anything is wrong)"
EXAMPLES: Final = """\
examples:
  verify out/
  verify s3://bucket/data --workers 16 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("dataset", help="folder or URL of the dataset")
    add_workers_argument(parser)
    add_store_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Verify; print each problem on a line. Exit code 1 if there is any."""
    from vlm_stream.convert import verify_dataset

    with Progress("verify", enabled=not (args.json or args.quiet)) as progress:
        report = verify_dataset(
            args.dataset,
            workers=args.workers,
            store=store_options(args),
            on_shard=lambda shard, num_shards, num_problems: progress.step(
                num_shards, samples=shard.totals.samples, num_bytes=shard.totals.bytes, bad=num_problems
            ),
        )
    if args.json:
        print_json(report.to_dict())
    else:
        for problem in report.problems:
            sys.stdout.write(f"{problem}\n")
        found = f"{len(report.problems)} problems" if report.problems else "no problems"
        sys.stdout.write(
            f"{report.url}: {report.num_shards} shards, {report.num_samples:,} samples, "
            f"{human_bytes(report.num_bytes)} checked in {report.seconds:.1f} s: {found}\n"
        )
    return 1 if report.problems else 0
