"""stats: the token, size and media histograms of a dataset, in the terminal or on a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from vlm_stream.commands.common import (
    add_output_arguments,
    add_store_arguments,
    human_bytes,
    open_console,
    print_json,
    print_table,
    store_options,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from vlm_stream.convert import DatasetStats, Histogram
    from vlm_stream.tokens import MediaColumns

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "bin_label", "overview", "run"]

NAME: Final = "stats"
HELP: Final = "print the token, size and media histograms of a dataset"
EXAMPLES: Final = """\
examples:
  stats out/
  stats s3://bucket/data --html stats.html
"""
_BAR_CHARS: Final = 40
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("dataset", help="folder or URL of the dataset")
    parser.add_argument("--processor", metavar="NAME_OR_PATH", help="also show lengths with media, for this processor")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots (one file, no scripts)")
    add_store_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the statistics, or write them to a page."""
    from vlm_stream.convert import dataset_stats

    count = _token_counter(args.processor) if args.processor else None
    stats = dataset_stats(args.dataset, store=store_options(args), count_tokens=count)
    if args.html is not None:
        from vlm_stream.commands.stats_page import render_page

        args.html.write_text(render_page(stats), encoding="utf-8")
    if args.json:
        print_json(stats.to_dict())
        return 0
    print_table(stats.url, overview(stats))
    console = open_console()
    for histogram in stats.histograms:
        console.print(_bars(histogram), markup=False)
    if args.html is not None:
        console.print(f"page: {args.html}", markup=False)
    return 0


def _token_counter(processor: str) -> Callable[[MediaColumns], npt.NDArray[np.int64]]:
    from vlm_stream.processors import load_processor
    from vlm_stream.tokens import Geometry, count_tokens

    geometry = Geometry.from_processor(load_processor(processor))
    return lambda columns: count_tokens(columns, geometry).tokens


def overview(stats: DatasetStats) -> dict[str, str]:
    """Return the dataset's totals as lines of a table."""
    totals = stats.totals
    counted = f"{stats.tokens.kind}, {stats.tokens.processor}" if stats.tokens.processor else stats.tokens.kind
    rows = {
        "samples": f"{totals.samples:,}",
        "shards": f"{stats.num_shards:,}",
        "bytes": human_bytes(totals.bytes),
        f"text tokens ({counted})": f"{totals.text_tokens:,}",
        "text only": f"{totals.text_only:,}",
        "images": f"{totals.images:,} ({totals.image_pixels / 1e6:,.1f} megapixels)",
        "videos": f"{totals.videos:,} ({totals.video_frames:,} frames, {totals.video_seconds:,.1f} s)",
        "audios": f"{totals.audios:,} ({totals.audio_seconds:,.1f} s)",
    }
    return rows | {f"dropped, {reason}": f"{count:,}" for reason, count in stats.dropped.items()}


def bin_label(histogram: Histogram, number: int) -> str:
    """Return the range of one bin: whole numbers without a fraction, single values alone."""
    begin, end = histogram.edges[number : number + 2]
    if begin == int(begin) and end == begin + 1:
        return f"{int(begin):,}"
    digits = 0 if end - begin >= 2 else 2
    return f"{begin:,.{digits}f} - {end:,.{digits}f}"


def _bars(histogram: Histogram) -> str:
    labels = [bin_label(histogram, number) for number in range(len(histogram.counts))]
    width = max(map(len, labels))
    most = max(histogram.counts)
    lines = [
        f"\n{histogram.name} ({histogram.unit}): {histogram.num_values:,} values, mean {histogram.mean:,.1f}, "
        f"median {histogram.median:,.1f}, p95 {histogram.p95:,.1f}, from {histogram.low:,.6g} to {histogram.high:,.6g}"
    ]
    lines += [
        f"  {label:>{width}}  {_bar(count, most)} {count:,}"
        for label, count in zip(labels, histogram.counts, strict=True)
    ]
    return "\n".join(lines)


def _bar(count: int, most: int) -> str:
    eighths = round(count / most * _BAR_CHARS * 8) if most else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
