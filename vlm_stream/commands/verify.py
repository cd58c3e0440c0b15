"""verify: every checksum, range and count of a dataset against its tars."""

import argparse
from typing import Final

from vlm_stream.commands import arguments, output
from vlm_stream.schema import human_bytes

EXAMPLES: Final = """\
examples:
  verify out/
  verify s3://bucket/data --workers 16 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", help="folder or URL of the dataset")
    arguments.add_workers_argument(parser)
    arguments.add_store_arguments(parser)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Verify; print each problem on a line. Exit code 1 if there is any."""
    from vlm_stream.convert import verify_dataset

    with output.Progress("verify", enabled=not (args.json or args.quiet)) as progress:
        report = verify_dataset(
            args.dataset,
            workers=args.workers,
            store=arguments.store_options(args),
            on_shard=lambda shard, num_shards, num_problems: progress.step(
                num_shards, samples=shard.totals.samples, num_bytes=shard.totals.bytes, bad=num_problems
            ),
        )
    if args.json:
        output.print_json(report)
    else:
        for problem in report.problems:
            output.say(str(problem))
        found = f"{len(report.problems)} problems" if report.problems else "no problems"
        output.say(
            f"{report.url}: {report.num_shards} shards, {report.num_samples:,} samples, "
            f"{human_bytes(report.num_bytes)} checked in {report.seconds:.1f} s: {found}"
        )
    return 1 if report.problems else 0
