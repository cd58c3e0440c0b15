"""recount: the text tokens and labels of a dataset, counted again for another processor."""

import argparse
from typing import Final

from vlm_stream.commands import arguments, output

EXAMPLES: Final = """\
examples:
  recount --processor Qwen/Qwen3-VL-8B-Instruct out/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", help="folder or URL of the dataset")
    arguments.add_processor_arguments(parser, "whose chat template and tokenizer", required=True)
    arguments.add_workers_argument(parser)
    arguments.add_store_arguments(parser)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Recount; print before and after. Exit code 1 if the processor refused any sample."""
    from vlm_stream.convert import recount

    with output.Progress("recount", enabled=not (args.json or args.quiet)) as progress:
        report = recount(
            args.dataset,
            args.processor,
            trust_remote_code=args.trust_remote_code,
            workers=args.workers,
            store=arguments.store_options(args),
            on_shard=lambda shard, num_shards: progress.step(num_shards, samples=shard.totals.samples),
        )
    if args.json:
        output.print_json(report)
    else:
        for bad in report.refused:
            output.say(str(bad))
        output.say(
            f"{report.url}: {report.tokens_before:,} text tokens before, {report.tokens_after:,} now, "
            f"{report.labels_after:,} of them labels; "
            f"{report.num_changed:,} samples changed, {len(report.refused):,} refused, {report.seconds:.1f} s"
        )
    return 1 if report.refused else 0
