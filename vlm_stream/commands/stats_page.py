"""The page of `stats --html`: one file, inline SVG, no scripts and nothing loaded from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from vlm_stream.commands.stats import bin_label, overview

if TYPE_CHECKING:
    from vlm_stream.convert import DatasetStats, Histogram

__all__ = ["render_page"]

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
table { border-collapse: collapse; } td { padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line); }
td + td { text-align: right; font-variant-numeric: tabular-nums; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 34rem), 1fr)); gap: 2rem;
       margin-top: 2rem; }
svg { width: 100%; height: auto; } rect { fill: var(--bar); } text { fill: var(--soft); font-size: 11px; }
line { stroke: var(--line); }
"""


def render_page(stats: DatasetStats) -> str:
    """Return the page as HTML."""
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in overview(stats).items())
    plots = "".join(_section(histogram) for histogram in stats.histograms)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(stats.url)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(stats.url)}</h1><p>digest {escape(stats.digest[:16])}</p>"
        f"<table>{rows}</table><main>{plots}</main></body></html>\n"
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
