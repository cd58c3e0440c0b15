"""make-shards: a meta file or data files become a dataset of shards. The form of the records is recognised."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.commands import arguments, output
from vlm_stream.schema import human_bytes

if TYPE_CHECKING:
    from vlm_stream.convert import ShardOptions, ShardReport

EXAMPLES: Final = """\
examples:
  make-shards meta.json out/
  make-shards meta.json s3://bucket/data --processor Qwen/Qwen2.5-VL-7B-Instruct --shuffle 0 --workers 16
  make-shards llava.json out/ --media-dir images/
  make-shards 'data/train-*.parquet' out/
  make-shards data.jsonl out/ --columns messages=dialog,images=photos --tags role_tag=who,content_tag=says
  make-shards meta.json out/ --bad-budget 0.1      (the same command again goes on where it was stopped)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", help="meta file, JSON array, JSON lines (.gz, .zst too), Parquet, Arrow; a folder, a pattern, a URL"
    )
    parser.add_argument("out", help="folder or object-store URL of the dataset")
    arguments.add_processor_arguments(parser, "count text tokens exactly, with its chat template")
    parser.add_argument("--samples-per-shard", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--max-shard-bytes",
        type=arguments.parse_bytes,
        metavar="B",
        help="limit of a tar, such as 1G; costs a pass over the input",
    )
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="shuffle all records before cutting shards")
    arguments.add_workers_argument(parser)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="a running Ray cluster; without it one is started here"
    )
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on with what the same conversion left at OUT; --no-resume refuses that",
    )
    parser.add_argument("--overwrite", action="store_true", help="remove the dataset at OUT first")
    group = parser.add_argument_group("input")
    group.add_argument("--names", metavar="A,B", help="only these entries of a meta file, or splits of a folder")
    group.add_argument("--on-mismatch", choices=("drop", "keep", "raise"), default="drop")
    arguments.add_form_arguments(group)
    group.add_argument("--confine-media", action="store_true", help="refuse media outside of their media_dir")
    group.add_argument(
        "--media-limits", metavar="NAME=NUMBER,...", help="the largest media: image_pixels, video_frames, file_bytes..."
    )
    group.add_argument("--exif-rotate", action="store_true", help="turn images as their EXIF orientation says")
    group.add_argument(
        "--bad-budget",
        type=float,
        default=0.03,
        metavar="RATE",
        help="fail when more than this share of the records is bad (default: %(default)s; 1: never)",
    )
    arguments.add_store_arguments(parser)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Convert; print the summary. Exit code 1 when more is bad than the budget allows."""
    from vlm_stream.allocator import keep_freed_memory
    from vlm_stream.convert import make_shards

    keep_freed_memory()
    with output.Progress("make-shards", enabled=not (args.json or args.quiet)) as progress:
        report = make_shards(
            args.input,
            args.out,
            options=_options(args),
            on_form=progress.say,
            on_part=lambda part, num_shards: progress.step(
                num_shards,
                samples=part.entry.totals.samples,
                num_bytes=part.entry.totals.bytes,
                bad=sum(bad.stage != "kept" for bad in part.bad),
            ),
        )
    if args.json:
        output.print_json(report.to_dict())
    else:
        output.print_table(f"{report.out}", summary(report))
    return 0


def _options(args: argparse.Namespace) -> ShardOptions:
    from vlm_stream.convert import ShardOptions

    parsed: dict[str, Any] = {
        "names": arguments.parse_names(args.names) if args.names else None,
        "columns": arguments.parse_mapping(args.columns),
        "tags": arguments.parse_mapping(args.tags),
        "media_hosts": arguments.parse_names(args.media_hosts),
        "media_limits": arguments.media_limits(args.media_limits),
        "store": arguments.store_options(args),
        "flags": True,
    }
    given = {option.name: getattr(args, option.name) for option in fields(ShardOptions) if option.name not in parsed}
    return ShardOptions(**parsed, **given)


def summary(report: ShardReport) -> dict[str, str]:
    totals = report.totals
    rows = {
        "records": f"{report.num_records:,}",
        "samples": f"{totals.samples:,}",
        "images": f"{totals.images:,}",
        "videos": f"{totals.videos:,}",
        "audios": f"{totals.audios:,}",
        "text only": f"{totals.text_only:,}",
        f"text tokens ({report.tokens})": f"{totals.text_tokens:,}",
        **({"  of them labels": f"{totals.label_tokens:,}"} if totals.label_tokens else {}),
        "shards": f"{report.num_shards:,}" + (f" ({report.num_kept} were there)" if report.num_kept else ""),
        "bytes": human_bytes(totals.bytes),
        "dropped": f"{report.num_dropped:,}",
    }
    rows |= {f"  {reason}": f"{count:,}" for reason, count in sorted(report.dropped.items(), key=lambda x: -x[1])}
    if report.kept:
        rows["kept in part"] = f"{sum(report.kept.values()):,}"
        rows |= {f"  {reason} ": f"{count:,}" for reason, count in sorted(report.kept.items(), key=lambda x: -x[1])}
    if report.whole:
        rows["clips without a table"] = f"{sum(report.whole.values()):,}"
        rows |= {f"  {reason}  ": f"{count:,}" for reason, count in sorted(report.whole.items(), key=lambda x: -x[1])}
    rows["seconds"] = f"{report.seconds:.1f}"
    return rows
