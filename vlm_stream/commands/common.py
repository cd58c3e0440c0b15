"""What the commands share: arguments for stores and output, sizes as people write them, tables."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from vlm_stream.storage import StoreOptions

__all__ = [
    "add_output_arguments",
    "add_store_arguments",
    "add_workers_argument",
    "human_bytes",
    "open_console",
    "parse_bytes",
    "parse_mapping",
    "print_json",
    "print_table",
    "store_options",
]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how to reach object stores; credentials come from the environment and the profile alone."""
    group = parser.add_argument_group("object stores")
    group.add_argument("--endpoint", metavar="URL", help="server of an S3-compatible store")
    group.add_argument("--region", help="S3 region")
    group.add_argument("--anonymous", action="store_true", help="send unsigned requests, for public buckets")
    group.add_argument("--allow-http", action="store_true", help="accept an endpoint without TLS")


def store_options(args: argparse.Namespace) -> StoreOptions | None:
    """Return the store options that the arguments name, None where they name none."""
    from vlm_stream.storage import StoreOptions

    if not (args.endpoint or args.region or args.anonymous or args.allow_http):
        return None
    return StoreOptions(
        endpoint=args.endpoint, region=args.region, anonymous=args.anonymous, allow_http=args.allow_http
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how results are printed."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the result as one JSON object, and no progress")
    group.add_argument("--quiet", action="store_true", help="no progress")


def add_workers_argument(parser: argparse.ArgumentParser) -> None:
    """Add the number of processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--workers", type=int, default=cores, metavar="N", help="shards at a time (default: the cores, %(default)s)"
    )


def parse_bytes(text: str) -> int:
    """Read a size as people write it.

    >>> parse_bytes("500M"), parse_bytes("2GiB"), parse_bytes("4096")
    (500000000, 2147483648, 4096)
    """
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match.group(2) not in _UNITS:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size; write 500M, 2GiB or a number of bytes")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def parse_mapping(text: str | None) -> dict[str, str]:
    """Read `a=b,c=d`.

    >>> parse_mapping("messages=conversations,images=image")
    {'messages': 'conversations', 'images': 'image'}
    """
    pairs = {}
    for part in (text or "").split(","):
        name, equals, value = part.partition("=")
        if part and not (name and equals and value):
            raise ConfigError(f"'{part}' is not of the form name=value; write for example messages=conversations.")
        if part:
            pairs[name.strip()] = value.strip()
    return pairs


def human_bytes(num_bytes: float) -> str:
    """Return a size as people read it.

    >>> human_bytes(1532928)
    '1.53 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that knows whether it writes to a terminal."""
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True, highlight=False)


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    open_console().print(table)


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False, sort_keys=True) + "\n")
