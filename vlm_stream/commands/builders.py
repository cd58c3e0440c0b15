"""builders: start, end and watch a named pool of builders on a Ray cluster, which several runs may use.

A run uses it by builders={pool: NAME}. 'up' for a pool that is there changes the number of its builders, and replaces
those that ask other things of the cluster.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError
from vlm_stream.schema import human_bytes

if TYPE_CHECKING:
    import argparse

    from rich.table import Table

    from vlm_stream.loader_options import RayBuilders

EXAMPLES: Final = """\
examples:
  builders up --name vlm --count 64 --address auto
  builders up --name vlm --count 16 --min-count 8 --max-count 64
  builders status --name vlm --watch
  builders down --name vlm
"""
_WATCH_S: Final = 2.0
_COLUMNS: Final = ("node", "built", "failed", "helped", "queued", "busy", "waited", "sent", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("action", choices=("up", "down", "status"))
    parser.add_argument("--name", required=True, help="the pool's name")
    parser.add_argument("--address", help="of the cluster: auto, or host:port (default: RAY_ADDRESS, or auto)")
    group = parser.add_argument_group("up")
    group.add_argument("--count", type=int, default=2, metavar="N", help="builders (default: 2)")
    group.add_argument("--max-count", type=int, metavar="N", help="most builders: more are started while all are busy")
    group.add_argument(
        "--min-count", type=int, metavar="N", help="fewest builders, with --max-count (default: --count)"
    )
    group.add_argument("--num-cpus", type=float, default=1.0, metavar="N", help="CPUs of each (default: 1)")
    group.add_argument(
        "--resource", action="append", default=[], metavar="NAME=N", help="other resources of each; may be repeated"
    )
    group = parser.add_argument_group("status")
    group.add_argument("--watch", action="store_true", help="go on showing it until Ctrl-C")
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    from vlm_stream.loader_options import RayBuilders

    options = RayBuilders(
        address=args.address or "auto",
        pool=args.name,
        count=args.count,
        min_count=args.min_count,
        max_count=args.max_count,
        num_cpus=args.num_cpus,
        resources=dict(map(_resource, args.resource)) or None,
    )
    if args.action == "up":
        return _up(options)
    return _down(options) if args.action == "down" else _status(options, args)


def _resource(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise ConfigError(f"'--resource {text}' says no number, so it cannot be asked for; write NAME=1") from None


def _up(options: RayBuilders) -> int:
    from vlm_stream.dispatch import start_keeper

    before = start_keeper(options)
    was = "" if before is None else f", {before} before"
    output.say(
        f"pool '{options.pool}' has {options.count} builders{was}. Use it by builders={{'pool': '{options.pool}'}}; "
        f"see it by: vlm-stream builders status --name {options.pool}"
    )
    return 0


def _down(options: RayBuilders) -> int:
    from vlm_stream.dispatch import end_pool

    end_pool(options)
    output.say(f"pool '{options.pool}' is gone; runs that used it go on with their local builders")
    return 0


def _status(options: RayBuilders, args: argparse.Namespace) -> int:
    rows = _rows(options)
    if args.json:
        output.print_json({"pool": options.pool, "builders": rows})
        return 0
    if not args.watch:
        output.print_whole(_table(rows))
        return 0
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), Live(_table(rows), console=output.open_console()) as live:
        while True:
            time.sleep(_WATCH_S)
            live.update(_table(_rows(options)))
    return 0


def _rows(options: RayBuilders) -> list[dict[str, Any]]:
    from vlm_stream.dispatch import builder_names, connect, has_pool, no_pool_error, statuses

    ray, pool = connect(options), options.pool or ""
    if not has_pool(ray, pool):
        raise no_pool_error(pool)
    found = statuses(ray, builder_names(ray, pool))
    return [{"builder": number, **row} for number, row in enumerate(found.values())]


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))  # whole on a terminal of 80 columns
    for name in ("id", *_COLUMNS):
        table.add_column(name, no_wrap=True)
    for row in rows:
        if "away" in row:
            table.add_row(str(row["builder"]), "no answer")
            continue
        shown = {
            **row,
            "busy": f"{row['busy']:.0%}",
            "waited": f"{row['waited_s']:.0f} s",
            "sent": human_bytes(row["bytes"]),
            "memory": human_bytes(row["resident_bytes"]),
        }
        table.add_row(str(row["builder"]), *(str(shown[name]) for name in _COLUMNS))
    return table
