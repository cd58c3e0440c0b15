"""index: tars made elsewhere become a dataset, without being rewritten."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError
from vlm_stream.schema import human_bytes

if TYPE_CHECKING:
    from vlm_stream.format import FieldMap

EXAMPLES: Final = """\
examples:
  index 's3://bucket/cc3m/{00000..00331}.tar'
  index data/*.tar --layout caption --prompt "Describe this image."
  index 'https://host/set/{000..015}.tar' --out indexes/
  index energon_dataset/#val
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="tars: paths, URLs, {000..127} patterns, folders; Energon datasets"
    )
    parser.add_argument(
        "--out",
        metavar="URL",
        help="where indexes and manifest go (default: beside the tars, else the user's cache, where loaders look); "
        "whoever reads that dataset names the place of the tars with --tars",
    )
    arguments.add_processor_arguments(parser, "count text tokens exactly")
    parser.add_argument("--overwrite", action="store_true", help="replace indexes and manifest that are there")
    arguments.add_workers_argument(parser)
    group = parser.add_argument_group("layout (default: as the first sample shows)")
    group.add_argument("--layout", choices=("native", "sharegpt", "caption", "bytes"))
    group.add_argument("--columns", metavar="NAME=FIELD,...", help="sharegpt: fields of the .json")
    group.add_argument("--tags", metavar="NAME=VALUE,...", help="sharegpt: role keys and roles")
    group.add_argument(
        "--media-first", action="store_true", help="sharegpt: media that nothing shows go before the first user text"
    )
    group.add_argument("--caption", metavar="MEMBER", help="caption: txt, or json:FIELD")
    group.add_argument("--prompt", help="caption: what the user asks")
    arguments.add_store_arguments(parser)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Index; print the summary. Exit code 1 when not one sample could be used."""
    from vlm_stream.convert import IndexOptions, index_urls

    options = IndexOptions(
        out=args.out,
        fields=_fields(args),
        processor=args.processor,
        trust_remote_code=args.trust_remote_code,
        workers=args.workers,
        overwrite=args.overwrite,
        store=arguments.store_options(args),
    )
    with output.Progress("index", enabled=not (args.json or args.quiet), unit="tars") as progress:
        manifest, place = index_urls(
            args.urls,
            options,
            on_part=lambda part, num_tars: progress.step(
                num_tars, samples=part.entry.totals.samples, num_bytes=part.entry.totals.bytes, bad=len(part.bad)
            ),
        )
    totals = manifest.totals
    if args.json:
        output.print_json(
            {
                "digest": manifest.digest,
                "dropped": manifest.dropped,
                "layout": manifest.fields.layout,
                "num_shards": len(manifest.shards),
                "place": place,
                "whole": manifest.whole,
                "totals": totals,
            }
        )
    else:
        rows = {
            "place": place,
            "tars": f"{len(manifest.shards):,}",
            "layout": manifest.fields.layout,
            "samples": f"{totals.samples:,}",
            "images": f"{totals.images:,}",
            "videos": f"{totals.videos:,}",
            "audios": f"{totals.audios:,}",
            f"text tokens ({manifest.tokens.kind})": f"{totals.text_tokens:,}",
            "bytes": human_bytes(totals.bytes),
            "left out": f"{sum(manifest.dropped.values()):,}",
        }
        rows |= {f"  {reason}": f"{count:,}" for reason, count in manifest.dropped.items()}
        rows |= {f"clips without a table, {reason}": f"{count:,}" for reason, count in manifest.whole.items()}
        output.print_table("index", rows)
    return 0 if totals.samples else 1


def _fields(args: argparse.Namespace) -> FieldMap | None:
    """Return the field map that the arguments name, None to guess it."""
    from vlm_stream.format import FieldMap

    named = {
        "columns": arguments.parse_mapping(args.columns),
        "tags": arguments.parse_mapping(args.tags),
        "caption": args.caption,
        "prompt": args.prompt,
        "media_first": args.media_first,
    }
    given = {name: value for name, value in named.items() if value}
    if args.layout is None:
        if given:
            flag = min(given).replace("_", "-")
            raise ConfigError(
                f"--{flag} belongs to a layout, and none is named: add --layout sharegpt or --layout caption."
            )
        return None
    return FieldMap(layout=args.layout, **given)
