"""stats: the token, size and media histograms of a dataset, in the terminal or on a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vlm_stream.commands import arguments, output
from vlm_stream.schema import human_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from vlm_stream.convert import DatasetStats, Histogram
    from vlm_stream.tokens import MediaColumns

EXAMPLES: Final = """\
examples:
  stats out/
  stats s3://bucket/data --html stats.html
"""
_BAR_CHARS: Final = 40
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", help="folder or URL of the dataset")
    arguments.add_processor_arguments(parser, "show lengths for this processor, not that of the conversion")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots (one file, no scripts)")
    arguments.add_store_arguments(parser)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from vlm_stream.convert import dataset_stats
    from vlm_stream.view import stats_page

    count = _token_counter(args.processor, args.trust_remote_code) if args.processor else None
    stats = dataset_stats(args.dataset, store=arguments.store_options(args), count_tokens=count)
    if args.html is not None:
        output.write_page(args.html, stats_page(stats, overview(stats), entry_rows(stats)))
    if args.json:
        output.print_json(stats)
        return 0
    output.print_table(stats.url, overview(stats))
    output.print_columns(*entry_rows(stats))
    for histogram in stats.histograms:
        output.say(_bars(histogram))
    if args.html is not None:
        output.say(f"page: {args.html}")
    return 0


def _token_counter(processor: str, trust_remote_code: bool) -> Callable[[MediaColumns], npt.NDArray[np.int64]]:
    from vlm_stream.processors import load_processor
    from vlm_stream.tokens import Geometry, count_tokens

    geometry = Geometry.from_processor(load_processor(processor, trust_remote_code=trust_remote_code))
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
    rows |= {f"dropped, {reason}": f"{count:,}" for reason, count in stats.dropped.items()}
    return rows | {f"clips without a table, {reason}": f"{count:,}" for reason, count in stats.whole.items()}


def entry_rows(stats: DatasetStats) -> list[list[str]]:
    """Return the names of the columns, and a row for each entry of the meta file."""
    whole, has_length = stats.totals, any(entry.length is not None for entry in stats.entries.values())
    names = ["entry", "samples", "text tokens", "tokens with media", "images", "videos", "audios", "bytes"]
    rows = [names]
    for name, entry in stats.entries.items():
        own = entry.totals
        samples = f"{own.samples:,} ({own.samples / whole.samples:.1%})"
        tokens = f"{own.text_tokens:,} ({own.text_tokens / max(whole.text_tokens, 1):.1%})"
        media = [f"{count:,}" for count in (own.images, own.videos, own.audios)]
        rows.append([name, samples, tokens, f"{entry.length or 0:,}", *media, human_bytes(own.bytes)])
    return rows if has_length else [row[:3] + row[4:] for row in rows]


def _bars(histogram: Histogram) -> str:
    labels = [histogram.label(number) for number in range(len(histogram.counts))]
    width = max(map(len, labels))
    most = max(histogram.counts)
    lines = [f"\n{histogram.name} ({histogram.unit}): {histogram.facts}"]
    lines += [
        f"  {label:>{width}}  {_bar(count, most)} {count:,}"
        for label, count in zip(labels, histogram.counts, strict=True)
    ]
    return "\n".join(lines)


def _bar(count: int, most: int) -> str:
    eighths = round(count / most * _BAR_CHARS * 8) if most else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
