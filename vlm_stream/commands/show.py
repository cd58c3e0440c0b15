"""show: samples, or what a rank gets at a step, in the terminal or as one HTML file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vlm_stream.commands import arguments, output
from vlm_stream.commands.view import open_viewer

if TYPE_CHECKING:
    import argparse

EXAMPLES: Final = """\
examples:
  show shards/ --key 000000512 --processor Qwen/Qwen2.5-VL-3B-Instruct
  show --config recipe.yaml --world 64 --step 41200 --rank 13 --html step.html
  show s3://bucket/data --key caption-17 --images blocks
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_stream_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", metavar="K", help="the samples with this key, or with this id of their own")
    what.add_argument("--step", type=int, metavar="N", help="what a rank gets at this step")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="default: %(default)s")
    arguments.add_state_argument(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one HTML file with the media in it")
    parser.add_argument(
        "--images",
        choices=("auto", "kitty", "iterm", "blocks", "none"),
        default="auto",
        help="pictures in the terminal: by its own protocol, or as half blocks (default: what it is known to show)",
    )


def run(args: argparse.Namespace) -> int:
    """Print, or write the file."""
    from vlm_stream.view import choose_pictures, print_sample, print_step, show_samples, show_step

    viewer = open_viewer(args)
    console = output.open_console()
    images = args.images
    if images == "auto":
        images = choose_pictures(os.environ, is_terminal=sys.stdout.isatty())
    try:
        if args.key is not None:
            refs = viewer.catalog.datasets.find(args.key)
            if args.html is None:
                for ref in refs:
                    print_sample(console, viewer, viewer.samples.read(ref), images)
            else:
                output.write_page(args.html, show_samples(viewer, refs).html)
        else:
            can_build = viewer.processor is not None
            view = viewer.book.view(viewer.book.base, args.step, args.rank, is_built=can_build)
            if args.html is None:
                print_step(console, view)
            else:
                output.write_page(args.html, show_step(viewer, view).html)
        if args.html is not None:
            output.say(f"page: {args.html}")
    finally:
        viewer.close()
    return 0
