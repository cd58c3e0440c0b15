"""precount: write _text_tokens and _media_tokens into a data file, for datasets that are loaded whole."""

import argparse
from typing import Final

from vlm_stream.commands import arguments, output

EXAMPLES: Final = """\
examples:
  precount data.jsonl --processor Qwen/Qwen2.5-VL-7B-Instruct --media-dir images/ --out counted.jsonl
  precount data.jsonl.gz --processor Qwen/Qwen2.5-VL-7B-Instruct --in-place
"""
_SHOWN: Final = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="JSON array or JSON lines (.gz too)")
    arguments.add_processor_arguments(parser, "whose tokens are counted", required=True)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", metavar="FILE", help="the new file (packed if it ends in .gz)")
    target.add_argument("--in-place", action="store_true", help="replace the file, once all is counted")
    arguments.add_form_arguments(parser)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    arguments.add_store_arguments(parser)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Count; print the sums. Exit code 1 if not one record could be counted."""
    from vlm_stream.convert import precount

    with output.Progress("precount", enabled=not (args.json or args.quiet), unit="records") as progress:
        report = precount(
            args.input,
            None if args.in_place else args.out,
            processor=args.processor,
            trust_remote_code=args.trust_remote_code,
            columns=arguments.parse_mapping(args.columns),
            tags=arguments.parse_mapping(args.tags),
            media_dir=args.media_dir,
            media_first=args.media_first or None,
            store=arguments.store_options(args),
            media_hosts=arguments.parse_names(args.media_hosts),
            workers=args.workers,
            on_form=progress.say,
            on_record=lambda num_records: progress.step(num_records, samples=1),
        )
    if args.json:
        output.print_json(report)
    else:
        for origin, reason in list(report.bad.items())[:_SHOWN]:
            output.say(f"no counts: {origin}: {reason}", stderr=True)
        rows = {
            "records": f"{report.num_records:,}",
            "text tokens": f"{report.text_tokens:,}",
            "media tokens": f"{report.media_tokens:,}",
            "without counts": f"{len(report.bad):,}",
        }
        output.print_table(report.out, rows)
    return 1 if report.bad and len(report.bad) == report.num_records else 0
