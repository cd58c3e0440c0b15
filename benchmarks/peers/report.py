"""From the numbers of a run to tables: on the terminal, in RESULTS.md and in the README."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["print_table", "rows_of", "write_results"]

Results = dict[str, Any]
Row = tuple[str, dict[str, str]]
_OURS = "vlm_stream"
_TITLES = {
    "vlm_stream": "vlm_stream",
    "webdataset": "WebDataset",
    "energon": "Energon",
    "mosaic": "MosaicML Streaming",
    "litdata": "LitData",
    "hf": "HF datasets",
}


def print_table(results: Results) -> None:
    """Print every row that was measured."""
    from rich.console import Console
    from rich.table import Table

    loaders = list(results["about"]["versions"])
    table = Table("figure", *(_TITLES[name] for name in loaders))
    for title, cells in rows_of(results):
        table.add_row(title, *(cells.get(name, "") for name in loaders))
    Console(width=200).print(table)
    for line in reasons_of(results):
        print(line)


def rows_of(results: Results) -> list[Row]:
    """Return the rows of the table, in the order of the figures."""
    makers: dict[str, Callable[[Any], Iterable[Row]]] = {
        "write": _write_rows,
        "bytes": _bytes_rows,
        "s3": _s3_rows,
        "encode": _encode_rows,
        "packing": _packing_rows,
        "balance": _balance_rows,
        "resume": _resume_rows,
        "start": _start_rows,
        "memory": _memory_rows,
        "damage": _damage_rows,
    }
    return [row for name, make in makers.items() if name in results for row in make(results[name])]


def reasons_of(results: Results) -> list[str]:
    """Return a line for everything that a loader cannot do or failed at."""
    found: dict[str, None] = {}

    def walk(value: Any, figure: str, loader: str) -> None:
        if isinstance(value, list):
            for each in value:
                walk(each, figure, loader)
        elif isinstance(value, dict):
            for kind in ("cannot", "error", "died"):
                if value.get(kind):
                    found[f"{figure}, {_TITLES[loader]}: {value[kind]}"] = None
            for name, each in value.items():
                walk(each, figure, name if name in _TITLES else loader)

    for name, value in results.items():
        if name != "about":
            walk(value, name, _OURS)
    return list(found)


def _median(runs: list[dict[str, Any]], number: Callable[[dict[str, Any]], float]) -> tuple[float, float] | None:
    """Return the median and half the spread, relative to it."""
    values = [number(run) for run in runs if "error" not in run and "cannot" not in run]
    if not values:
        return None
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / 2 / middle if middle else 0.0


def _rates(runs: dict[str, list[dict[str, Any]]], number: Callable[[dict[str, Any]], float]) -> dict[str, str]:
    """Return rates with their spread, and how often ours goes into it (above 1: we are faster)."""
    found = {name: _median(each, number) for name, each in runs.items()}
    ours = found.get(_OURS)
    cells = {}
    for name, value in found.items():
        if value is None:
            cells[name] = "-"
        else:
            spread = f" ±{value[1]:.0%}" if len(runs[name]) > 1 else ""
            ratio = "" if name == _OURS or ours is None else f" ({ours[0] / value[0]:.1f}x)"
            cells[name] = f"{value[0]:,.0f}{spread}{ratio}"
    return cells


def _each(runs: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> dict[str, str]:
    cells = {}
    for name, run in runs.items():
        if name in _TITLES:
            first = run[0] if isinstance(run, list) else run
            cells[name] = "-" if "cannot" in first else "fails" if "error" in first else text(first)
    return cells


def _write_rows(found: Results) -> Iterable[Row]:
    sizes = {name for each in found.values() for name in each if name.startswith("raw-")}
    for size in sorted(sizes, key=lambda name: int(name.split("-")[1])):
        cells = {name: f"{each[size]['seconds']:.1f}" for name, each in found.items() if size in each}
        yield f"written, {int(size.split('-')[1]):,} samples, s", cells


def _bytes_rows(found: Results) -> Iterable[Row]:
    yield "1 bytes only, local disk, samples/s", _rates(found, lambda run: run["samples"] / run["seconds"])
    yield "1 the same, only the first pass of each process", _rates(found, lambda run: run["first"])
    yield "1 the same, every byte compared with a checksum", _rates(found, lambda run: run["checked"])


def _s3_rows(found: Results) -> Iterable[Row]:
    for latency, runs in found.items():
        yield f"2 bytes only, S3 + {latency}, samples/s", _rates(runs, lambda run: run["samples"] / run["seconds"])
    last = list(found.values())[-1]
    yield "2 requests a sample", _each(last, lambda run: f"{run['requests'] / run['samples']:.2f}")
    yield "2 bytes sent / bytes of samples", _each(last, lambda run: f"{run['sent'] / run['bytes']:.2f}")


def _encode_rows(found: Results) -> Iterable[Row]:
    for workers in ("1 workers", "2 workers"):
        runs = dict(found[workers])
        compact = runs.pop(f"{_OURS} compact", None)
        title = workers.replace("1 workers", "1 worker")
        yield f"3 decode, encode, pack, {title}, tokens/s", _rates(runs, lambda run: run["tokens"] / run["seconds"])
        yield "3 the same, samples/s", _rates(runs, lambda run: run["samples"] / run["seconds"])
        if compact and (value := _median(compact, lambda run: run["tokens"] / run["seconds"])):
            yield f"3 with compact pixels, {title}, tokens/s", {_OURS: f"{value[0]:,.0f} ±{value[1]:.0%}"}
    if loop := _median(found["loop"], lambda run: run["tokens"] / run["seconds"]):
        yield f"3 the processor in a loop, one process: {loop[0]:,.0f} tokens/s", {}


def _packing_rows(found: Results) -> Iterable[Row]:
    yield "4 fill of packs of 8,192", _each(found, lambda run: f"{run['fill']:.2%}")
    yield (
        "4 padding (without packing: in batches of 8)",
        {name: "-" if "padding" not in run else f"{run['padding']:.2%}" for name, run in found.items()},
    )


def _balance_rows(found: Results) -> Iterable[Row]:
    for ranks, runs in found.items():
        yield f"5 imbalance, {ranks} ranks, LLM / ViT", _each(runs, lambda run: f"{run['llm']:.3f} / {run['vit']:.3f}")


def _resume_rows(found: Results) -> Iterable[Row]:
    for share in ("0%", "10%", "90%"):
        runs = {name: rows[share] for name, rows in found.items()}
        title = "6 first batch of an epoch, s" if share == "0%" else f"6 first batch after a resume at {share}, s"
        yield title, _each(runs, lambda run: f"{run['first']:.3f}" if run["first"] else "none came")
        if share != "0%":
            yield f"6 samples re-read, lost, repeated at {share}", _each(runs, _continuity)
    changed = {name: rows["2 ranks -> 1"] for name, rows in found.items()}
    yield "6 lost, repeated with 2 ranks -> 1", _each(changed, lambda run: f"{run['lost']}, {run['repeated']}")
    late = {name: rows["90%"] for name, rows in found.items()}
    yield "7 state, bytes", _each(late, lambda run: f"{run['state_bytes']:,}")


def _continuity(run: dict[str, Any]) -> str:
    reread = "not counted (mapped)" if run["reread"] is None else f"{run['reread']:,}"
    return f"{reread}, {run['lost']:,}, {run['repeated']:,}"


def _start_rows(found: Results) -> Iterable[Row]:
    for shards, runs in found.items():
        cells = {}
        for name, each in runs.items():
            value = _median(each, lambda run: run["seconds"])
            cells[name] = "-" if value is None else f"{value[0]:.3f} ±{value[1]:.0%}"
        yield f"8 first batch, {int(shards):,} shards, s", cells


def _memory_rows(found: Results) -> Iterable[Row]:
    title = f"9 peak memory, shuffle over {found['shuffled']:,} samples, MB"
    yield title, _each(found, lambda run: f"{run['megabytes']:,.0f}")


def _damage_rows(found: Results) -> Iterable[Row]:
    def said(run: dict[str, Any]) -> str:
        words = [f"{run['lost']} lost"]
        words += [f"{run['wrong']} wrong"] * bool(run["wrong"])
        words += ["dies"] * bool(run["died"])
        words += ["named"] * bool(run["said"])
        words += ["unnoticed"] * bool((run["lost"] or run["wrong"]) and not run["died"] and not run["said"])
        return ", ".join(words)

    for kind, title in (("header", "10 one damaged header"), ("payload", "10 one flipped byte")):
        yield title, _each({name: rows[kind] for name, rows in found.items()}, said)


def write_results(results: Results, file: Path, readme: Path) -> None:
    """Write RESULTS.md, and the README's table between its marks."""
    from benchmarks.peers.words import EXPLANATIONS, README_ROWS

    about = results["about"]
    loaders = list(about["versions"])
    head = [
        "# The same work, every loader, one run",
        "",
        "Made by `python -m benchmarks.peers --full` and `--report`; how it is measured: [README](README.md).",
        "",
        f"{about['date']}; {about['machine']}; Python {about['python']}, torch {about['torch']}. Rates and starts are "
        "medians with half the spread of the runs; (2.0x): vlm_stream does twice as much in the same time.",
        "",
    ]
    versions = " ".join(f"| {about['versions'][name]}" for name in loaders)
    table = [
        "| figure | " + " | ".join(_TITLES[name] for name in loaders) + " |",
        "|---" * (len(loaders) + 1) + "|",
        f"| version {versions} |",
    ]
    rows = rows_of(results)
    for title, cells in rows:
        table.append(f"| {title} | " + " | ".join(cells.get(name, "") for name in loaders) + " |")
    reasons = ["", "What the dashes and failures mean, in the loaders' own words or ours:", ""]
    reasons += [f"- {line}" for line in reasons_of(results)]
    remarks = ["", *about["remarks"]] if about.get("remarks") else []
    lines = [*head, *table, *remarks, *reasons, "", "## What explains each result", "", *EXPLANATIONS, ""]
    file.write_text("\n".join(lines), encoding="utf-8")

    chosen = [(short, cells) for long, short in README_ROWS.items() for title, cells in rows if title == long]
    block = [table[0].replace("| figure |", "| |"), table[1]]
    block += [f"| {title} | " + " | ".join(cells.get(name, "") for name in loaders) + " |" for title, cells in chosen]
    text = readme.read_text(encoding="utf-8")
    begin, end = "<!-- comparison: begin -->", "<!-- comparison: end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text(f"{before}{begin}\n" + "\n".join(block) + f"\n{end}{after}", encoding="utf-8")
