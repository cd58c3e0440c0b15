"""stats: the token, size and media histograms of a dataset, in the terminal or on a page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vlm_stream.commands import arguments, output

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from vlm_stream.convert import DatasetStats, Histogram
    from vlm_stream.tokens import MediaColumns

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: Final = """\
examples:
  stats out/
  stats s3://bucket/data --html stats.html
"""
_BAR_CHARS: Final = 40
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_WIDTH: Final = 640
_HEIGHT: Final = 220
_BELOW: Final = 62
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2433; --soft: #5b6475; --bar: #3b6fb6; --paper: #fbfbfa; --line: #d8dce3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --soft: #9aa3b2; --bar: #6fa0e0; --paper: #14171c; --line: #313743; }
}
body { margin: 2rem auto; max-width: 88rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 0 0 .2rem; }
p { color: var(--soft); margin: 0 0 .6rem; font-size: .9rem; }
table { border-collapse: collapse; margin-bottom: 1.5rem; }
td, th { padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left; }
td + td, th + th { text-align: right; font-variant-numeric: tabular-nums; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 34rem), 1fr)); gap: 2rem;
       margin-top: 2rem; }
svg { width: 100%; height: auto; } rect { fill: var(--bar); } text { fill: var(--soft); font-size: 11px; }
line { stroke: var(--line); }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("dataset", help="folder or URL of the dataset")
    arguments.add_processor_arguments(parser, "also show lengths with media, for this processor")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots (one file, no scripts)")
    arguments.add_store_arguments(parser)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the statistics, or write them to a page."""
    from vlm_stream.convert import dataset_stats

    count = _token_counter(args.processor, args.trust_remote_code) if args.processor else None
    stats = dataset_stats(args.dataset, store=arguments.store_options(args), count_tokens=count)
    if args.html is not None:
        args.html.write_text(render_page(stats), encoding="utf-8")
    if args.json:
        output.print_json(stats.to_dict())
        return 0
    output.print_table(stats.url, overview(stats))
    output.print_columns(*entry_rows(stats))
    console = output.open_console()
    for histogram in stats.histograms:
        console.print(_bars(histogram), markup=False)
    if args.html is not None:
        console.print(f"page: {args.html}", markup=False)
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
        "bytes": output.human_bytes(totals.bytes),
        f"text tokens ({counted})": f"{totals.text_tokens:,}",
        "text only": f"{totals.text_only:,}",
        "images": f"{totals.images:,} ({totals.image_pixels / 1e6:,.1f} megapixels)",
        "videos": f"{totals.videos:,} ({totals.video_frames:,} frames, {totals.video_seconds:,.1f} s)",
        "audios": f"{totals.audios:,} ({totals.audio_seconds:,.1f} s)",
    }
    return rows | {f"dropped, {reason}": f"{count:,}" for reason, count in stats.dropped.items()}


def entry_rows(stats: DatasetStats) -> list[list[str]]:
    """Return a row for each entry of the meta file, behind the names of the columns."""
    whole, has_length = stats.totals, any(entry.length is not None for entry in stats.entries.values())
    names = ["entry", "samples", "text tokens", "tokens with media", "images", "videos", "audios", "bytes"]
    rows = [names]
    for name, entry in stats.entries.items():
        own = entry.totals
        samples = f"{own.samples:,} ({own.samples / whole.samples:.1%})"
        tokens = f"{own.text_tokens:,} ({own.text_tokens / max(whole.text_tokens, 1):.1%})"
        media = [f"{count:,}" for count in (own.images, own.videos, own.audios)]
        rows.append([name, samples, tokens, f"{entry.length or 0:,}", *media, output.human_bytes(own.bytes)])
    return rows if has_length else [row[:3] + row[4:] for row in rows]


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


def render_page(stats: DatasetStats) -> str:
    """Return the page as HTML."""
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in overview(stats).items())
    names, *entries = entry_rows(stats)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in entries)
    plots = "".join(_section(histogram) for histogram in stats.histograms)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(stats.url)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(stats.url)}</h1><p>digest {escape(stats.digest[:16])}</p>"
        f"<table>{rows}</table><h2>Entries</h2><table><tr>{head}</tr>{body}</table>"
        f"<main>{plots}</main></body></html>\n"
    )


def _section(histogram: Histogram) -> str:
    facts = (
        f"{histogram.num_values:,} values; mean {histogram.mean:,.1f}, median {histogram.median:,.1f}, "
        f"95 % below {histogram.p95:,.1f}; from {histogram.low:,.6g} to {histogram.high:,.6g}"
    )
    title = f"{escape(histogram.name)} ({escape(histogram.unit)})"
    return f"<section><h2>{title}</h2><p>{escape(facts)}</p>{_plot(histogram)}</section>"


def _plot(histogram: Histogram) -> str:
    num_bins = len(histogram.counts)
    step = _WIDTH / num_bins
    most = max(histogram.counts) or 1
    parts = [f'<line x1="0" y1="{_HEIGHT}" x2="{_WIDTH}" y2="{_HEIGHT}"/>']
    for number, count in enumerate(histogram.counts):
        label = bin_label(histogram, number)
        height = max(count / most * (_HEIGHT - 20), 1.0 if count else 0.0)
        left, top = number * step, _HEIGHT - height
        parts.append(
            f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{step - 2:.1f}" height="{height:.1f}">'
            f"<title>{escape(label)}: {count:,}</title></rect>"
        )
        if count:
            parts.append(f'<text x="{left + step / 2:.1f}" y="{top - 4:.1f}" text-anchor="middle">{count:,}</text>')
        begin = label.partition(" - ")[0]
        middle, below = left + step / 2, _HEIGHT + 12
        parts.append(
            f'<text x="{middle:.1f}" y="{below}" text-anchor="end" '
            f'transform="rotate(-40 {middle:.1f} {below})">{escape(begin)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _BELOW}" role="img" '
        f'aria-label="histogram of {escape(histogram.name)}">{"".join(parts)}</svg>'
    )
