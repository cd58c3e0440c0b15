"""What commands print: tables and JSON on standard output, progress on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import ConfigError, clean
from vlm_stream.schema import human_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_LINE_SECONDS: Final = 10.0
_ANY_WIDTH: Final = 10_000


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that knows whether it writes to a terminal."""
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True, highlight=False)


def table_of(title: str, rows: Mapping[str, str]) -> Table:
    from rich.table import Table

    table = Table(title=plain(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(plain(name), plain(value))
    return table


def plain(text: str) -> Text:
    """Return a text of a dataset as it is: nothing in it is obeyed by the terminal, or is markup."""
    from rich.text import Text

    return Text(clean(text))


def say(text: str, *, stderr: bool = False) -> None:
    """Print a line; whatever a dataset has put into it is only shown."""
    open_console(stderr=stderr).print(plain(text))


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    print_whole(table_of(title, rows))


def print_whole(table: Table) -> None:
    """Print a table, wider than the terminal rather than cut: names are there to be copied."""
    from rich.measure import Measurement

    console = open_console()
    widest = Measurement.get(console, console.options.update(width=_ANY_WIDTH), table).maximum
    console.width = max(console.width, widest)
    console.print(table)


def write_page(path: Path, html: str) -> None:
    """Write a page, into a folder that may have to be made.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the page {path} cannot be written ({error.strerror or error}); choose another --html"
        ) from error


def print_columns(names: Sequence[str], *rows: Sequence[str]) -> None:
    """Print rows below the names of their columns."""
    from rich.table import Table

    table = Table(*names)
    for row in rows:
        table.add_row(*map(plain, row))
    print_whole(table)


def print_json(data: Any) -> None:
    """Print one JSON object: a mapping, or a dataclass."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False, sort_keys=True, default=asdict) + "\n")


class Progress:
    """Counts samples, bytes and bad ones, and shows them; use it in a `with` block."""

    def __init__(self, title: str, *, enabled: bool = True, unit: str = "shards") -> None:
        """Name the work, and what its tasks are."""
        self.title = title
        self.enabled = enabled
        self._unit = unit
        self.num_samples = self.num_bytes = self.num_bad = self.num_done = 0
        self.num_tasks = 0
        self._begin = time.monotonic()
        self._last_line = self._begin
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._begin = self._last_line = time.monotonic()
        if self.enabled and sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(f"{self._unit}  {{task.fields[rates]}}  ETA"),
                TimeRemainingColumn(),
                console=open_console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=None, rates="")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.enabled and self.num_done and kind is None:
            self._write_line()

    def say(self, line: str) -> None:
        """Print a line beside the numbers, if these are shown."""
        if self.enabled:
            say(line, stderr=True)

    def step(self, num_tasks: int, *, samples: int = 0, num_bytes: int = 0, bad: int = 0) -> None:
        """Count one finished task of `num_tasks`."""
        self.num_tasks = num_tasks
        self.num_done += 1
        self.num_samples += samples
        self.num_bytes += num_bytes
        self.num_bad += bad
        if self._bar is not None:
            self._bar.update(self._task, total=self.num_tasks, completed=self.num_done, rates=self._rates())
        elif self.enabled and time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._write_line()

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._begin, 1e-6)
        rate = f"{self.num_samples / seconds:,.0f} samples/s  {human_bytes(self.num_bytes / seconds)}/s"
        return f"{rate}  {self.num_bad} bad"

    def _write_line(self) -> None:
        self._last_line = time.monotonic()
        seconds = self._last_line - self._begin
        left = seconds / max(self.num_done, 1) * (self.num_tasks - self.num_done)
        sys.stderr.write(
            f"{self.title}: {self.num_done}/{self.num_tasks} {self._unit}, {self.num_samples} samples, "
            f"{self._rates()}, ETA {left:.0f} s\n"
        )
        sys.stderr.flush()
