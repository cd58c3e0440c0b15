"""From the numbers of a run to tables: on the terminal, in RESULTS.md and in the README."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers.questions import QUESTIONS, Prices, Row

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["print_tables", "reasons_of", "rows_of", "write_results"]

Results = dict[str, Any]
_TITLES = {
    "vlm_stream": "vlm_stream",
    "vlm_stream compact": "vlm_stream, compact pixels",
    "webdataset": "WebDataset",
    "energon": "Energon",
    "mosaic": "MosaicML Streaming",
    "litdata": "LitData",
    "hf": "HF datasets",
    "ray_data": "Ray Data",
    "lance": "Lance",
}
_BEGIN, _END = "<!-- comparison: begin -->", "<!-- comparison: end -->"


def rows_of(results: Results, name: str, prices: Prices) -> list[Row]:
    """Return the rows of a question."""
    return list(QUESTIONS[name].rows(results[name], results, prices))


def reasons_of(found: Results) -> list[str]:
    """Return a line for everything that a loader of a question cannot do, failed at or left out."""
    reasons: dict[str, None] = {}

    def walk(value: Any, way: str) -> None:
        if isinstance(value, list):
            for each in value:
                walk(each, way)
        elif isinstance(value, dict):
            for kind in ("cannot", "error", "died"):
                if value.get(kind):
                    reasons[f"{_TITLES[way]}: {value[kind]}"] = None
            if value.get("missing"):
                reasons[f"{_TITLES[way]}: {value['missing']} samples of the epoch did not come"] = None
            for name, each in value.items():
                walk(each, name if name in _TITLES else way)

    walk(found, "vlm_stream")
    return list(reasons)


def _columns(rows: Iterable[Row]) -> list[str]:
    found = {way for row in rows for way in row.cells}
    return [way for way in _TITLES if way in found]


def _table(rows: list[Row]) -> list[str]:
    ways = _columns(rows)
    lines = ["| | " + " | ".join(_TITLES[way] for way in ways) + " |", "|---" * (len(ways) + 1) + "|"]
    lines += [
        f"| {row.title} | " + " | ".join(row.cells.get(way, "") for way in ways) + " |" for row in rows if row.cells
    ]
    return lines


def _asked(results: Results) -> list[str]:
    return [name for name in QUESTIONS if name in results]


def print_tables(results: Results, prices: Prices) -> None:
    """Print every row that was measured."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=230)
    for name in _asked(results):
        rows = rows_of(results, name, prices)
        ways = _columns(rows)
        table = Table(name, *(_TITLES[way] for way in ways), title=QUESTIONS[name].title, title_justify="left")
        for row in rows:
            table.add_row(row.title, *(row.cells.get(way, "") for way in ways))
        console.print(table)
        for line in reasons_of(results[name]):
            console.print(f"  {line}", style="dim", markup=False)


def results_text(results: Results, prices: Prices) -> str:
    """Return RESULTS.md."""
    about = results["about"]
    versions = ", ".join(f"{_TITLES[name]} {version}" for name, version in about["versions"].items())
    lines = [
        "# The same work, every loader, one run",
        "",
        "Made by `python -m benchmarks.peers --full` and `--report`; how it is measured: [README](README.md).",
        "",
        f"{about['date']}; {about['machine']}; Python {about['python']}, torch {about['torch']}. {versions}.",
        "",
        "Medians with half the spread of the runs; (2.0x): vlm_stream's figure is twice this one. A dash: the loader "
        "has no way to do it.",
    ]
    if about["scale"] != "full":
        lines += ["", f"**A {about['scale']} run: rates of so little data say nothing.**"]
    numbers = {name: number for number, name in enumerate(QUESTIONS, start=1)}
    for name in _asked(results):
        rows = rows_of(results, name, prices)
        lines += ["", f"## {numbers[name]}. {QUESTIONS[name].title}", "", *_table(rows), ""]
        lines += [f"{row.title}.\n" for row in rows if not row.cells]
        lines += [QUESTIONS[name].why]
        if reasons := reasons_of(results[name]):
            lines += ["", *(f"- {reason}" for reason in reasons)]
    return "\n".join([*lines, ""])


def write_results(results: Results, prices: Prices, file: Path, readme: Path) -> None:
    """Write RESULTS.md, and the README's table between its marks."""
    file.write_text(results_text(results, prices), encoding="utf-8")
    rows = [row for name in _asked(results) for row in rows_of(results, name, prices) if row.short]
    table = _table([Row(row.short, row.cells) for row in rows])
    before, _, rest = readme.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    readme.write_text("\n".join([f"{before}{_BEGIN}", *table, f"{_END}{after}"]), encoding="utf-8")
