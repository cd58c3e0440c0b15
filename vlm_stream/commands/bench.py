"""bench: run the loader of a recipe without a model, and show where the time goes.

Rates, seconds and --seconds count from the first batch on; what came before it is the start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError

EXAMPLES: Final = """\
examples:
  bench recipe.yaml --batches 200
  bench shards/ --processor Qwen/Qwen2.5-VL-3B-Instruct --pack-size 8192 --set num_workers=4 --seconds 60
  bench recipe.yaml --set 'builders={address: auto, count: 8}' --save-costs costs.json
"""
_MIN_BATCHES: Final = 16
_SHOW_S: Final = 0.5
_LINE_S: Final = 10.0
_LINE: Final = ("batches", "samples_per_s", "tokens_per_s", "megabytes_per_s", "padding", "bad_samples")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_stream_arguments(parser)
    parser.add_argument(
        "--batches", type=arguments.parse_count, metavar="N", help="stop after N batches (default: an epoch)"
    )
    parser.add_argument(
        "--seconds", type=arguments.parse_duration, metavar="S", help="stop S seconds after the first batch"
    )
    parser.add_argument(
        "--save-costs", metavar="FILE", help="write what building costs by samples, tokens and pixels, for plan --costs"
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Load batches and throw them away; print the numbers live and at the end."""
    from vlm_stream.loader import StreamLoader

    given = arguments.loader_arguments(args)
    arguments.need_processor(given)
    if args.world is not None:
        given |= {"rank": given.get("rank", 0), "world_size": args.world}
    loader = StreamLoader(**given)
    clock, costs = _Clock(), None
    with _Live(enabled=not (args.json or args.quiet)) as show:
        for _ in itertools.islice(loader, args.batches):
            clock.see(loader.metrics)
            costs = loader.costs() if args.save_costs else None
            show.update(lambda: clock.numbers(loader.metrics()))
            if args.seconds is not None and clock.seconds > args.seconds:
                break
        numbers = clock.numbers(loader.metrics())
    if args.json:
        output.print_json(numbers | {"bad_by_reason": loader.ledger.by_reason()})
    else:
        output.print_table("bench", {_title(name): _shown(value) for name, value in numbers.items()})
        for line in loader.ledger.newest:
            output.say(f"bad: {line}", stderr=True)
    if args.save_costs:
        _save_costs(args.save_costs, costs)
    return 0


def _save_costs(path: str, costs: dict[str, Any] | None) -> None:
    num_batches = 0 if costs is None else costs["batches"]
    if num_batches < _MIN_BATCHES:
        raise ConfigError(
            f"{num_batches} batches were built by workers, and costs are learned from {_MIN_BATCHES} at least, so "
            f"{path} was not written; set num_workers or builders (--set num_workers=2), and build more batches"
        )
    try:
        Path(path).write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the costs cannot be written to {path} ({error.strerror or error}); choose another --save-costs"
        ) from error


class _Clock:
    """Takes the start out of a loader's numbers: workers, imports and the first batch take seconds, once."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._first_s = self._begun_s
        self._first: Mapping[str, float] | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._first_s

    def see(self, metrics: Any) -> None:
        """Note a batch; the first one ends the start."""
        if self._first is None:
            self._first, self._first_s = metrics(), time.monotonic()

    def numbers(self, now: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers with rates since the first batch; where there is no other, those of the start."""
        seconds, first = self.seconds, self._first
        numbers = {**now, "seconds": seconds, "start_seconds": self._first_s - self._begun_s}
        if first is None or now["batches"] == first["batches"]:
            return numbers
        for name in ("samples", "tokens"):
            numbers[f"{name}_per_s"] = (now[name] - first[name]) / seconds
        numbers["megabytes_per_s"] = (_megabytes(now) - _megabytes(first)) / seconds
        batches = now["batches"] - first["batches"]
        for name in [name for name in now if name.endswith("_s_per_batch")]:
            spent = now[name] * now["batches"] - first.get(name, 0.0) * first["batches"]
            numbers[name] = spent / batches
        return numbers


def _megabytes(numbers: Mapping[str, float]) -> float:
    """Return how much was wanted so far: what was read, without what was read over."""
    return numbers["bytes_read"] / max(numbers["read_amplification"], 1e-9) / 1e6


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
        numbers = {_title(name): _shown(value) for name, value in metrics().items()}
        if self._live is None:
            sys.stderr.write("bench: " + ", ".join(f"{_title(name)} {numbers[_title(name)]}" for name in _LINE) + "\n")
        else:
            self._live.update(output.table_of("", numbers))


def _title(name: str) -> str:
    """Return a number's name as people read it.

    >>> _title("encode_s_per_batch"), _title("megabytes_per_s"), _title("bad_samples")
    ('encode, s/batch', 'MB/s', 'bad samples')
    """
    name = name.replace("_s_per_batch", ", s/batch").replace("_per_", "/")
    return name.replace("megabytes/s", "MB/s").replace("resident_megabytes", "memory, MB").replace("_", " ")


def _shown(value: float) -> str:
    """Return a number with four digits or all before the point, never as a power of ten.

    >>> _shown(32450.5), _shown(3.69234), _shown(0.000109), _shown(17)
    ('32,450', '3.692', '0.0001', '17')
    """
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.4g}"
