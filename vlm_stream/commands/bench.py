"""bench: run the loader of a recipe without a model, and show where the time goes."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: Final = """\
examples:
  bench recipe.yaml --batches 200
  bench shards/ --processor Qwen/Qwen2.5-VL-3B-Instruct --pack-size 8192 --set num_workers=4 --seconds 60
"""
_SHOW_S: Final = 0.5
_LINE_S: Final = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_stream_arguments(parser)
    parser.add_argument("--batches", type=int, metavar="N", help="stop after N batches (default: an epoch)")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop after S seconds")
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Load batches and throw them away; print the numbers live and at the end."""
    from vlm_stream.loader import StreamLoader

    given = arguments.loader_arguments(args)
    if "processor" not in given:
        raise ConfigError("batches cannot be encoded without a processor; name it with --processor or in the recipe")
    if args.world is not None:
        given |= {"rank": given.get("rank", 0), "world_size": args.world}
    loader = StreamLoader(**given)
    show = _Live(enabled=not (args.json or args.quiet))
    begin = time.monotonic()
    with show:
        for _ in itertools.islice(loader, args.batches):
            show.update(loader.metrics)
            if args.seconds is not None and time.monotonic() - begin > args.seconds:
                break
        numbers = loader.metrics() | {"seconds": time.monotonic() - begin}
    if args.json:
        output.print_json(numbers | {"bad_by_reason": loader.ledger.by_reason()})
    else:
        output.print_table("bench", {name: _shown(value) for name, value in numbers.items()})
        for line in loader.ledger.newest:
            output.open_console(stderr=True).print(f"bad: {line}")
    return 0


class _Live:
    """A table that is drawn again on a terminal, a line now and then elsewhere."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._live: Any = None
        self._next = 0.0

    def __enter__(self) -> _Live:
        if self._enabled and sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=output.open_console(stderr=True), transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, metrics: Any) -> None:
        now = time.monotonic()
        if not self._enabled or now < self._next:
            return
        self._next = now + (_SHOW_S if self._live is not None else _LINE_S)
        numbers = metrics()
        if self._live is None:
            names = ("batches", "samples_per_s", "tokens_per_s", "megabytes_per_s", "padding", "bad_samples")
            sys.stderr.write("bench: " + ", ".join(f"{name} {_shown(numbers[name])}" for name in names) + "\n")
            return
        from rich.table import Table

        table = Table(show_header=False)
        for name, value in numbers.items():
            table.add_row(name, _shown(value))
        self._live.update(table)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
