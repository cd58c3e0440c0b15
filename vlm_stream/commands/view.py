"""view: a page in the browser to see samples, packs, steps and runs. It binds to this machine alone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vlm_stream.commands import arguments, output
from vlm_stream.recipe import normalise_sources

if TYPE_CHECKING:
    import argparse

    from vlm_stream.view import Viewer

EXAMPLES: Final = """\
examples:
  view shards/ --processor Qwen/Qwen2.5-VL-3B-Instruct
  view --config recipe.yaml --world 64 --state checkpoint.pt --ledger ledger.jsonl
  view s3://bucket/data --pack-size 8192 --port 9000
"""
_PORT: Final = 8400
_PACK_SIZE: Final = 8192
_INDEX_BYTES: Final = 512 << 20
"""Of indexes that are kept: pages go to and fro, and compare plans."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_stream_arguments(parser)
    arguments.add_state_argument(parser)
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="the ledger of that run (ledger_path)")
    parser.add_argument("--port", type=int, default=_PORT, help="0: any that is free (default: %(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="another address than this machine's own needs the token in the URL"
    )


def open_viewer(args: argparse.Namespace) -> Viewer:
    """Open what the arguments name; what they do not say of packs and of memory is what suits a look."""
    from vlm_stream.processors import open_processor
    from vlm_stream.view import Viewer, Watched, read_ledger

    given = arguments.loader_arguments(args)
    if given.get("mode", "packed") == "packed" and given.get("pack_size") is None:
        given["pack_size"] = _PACK_SIZE
    given.setdefault("index_bytes", _INDEX_BYTES)
    sources, processor, options = arguments.split_options(given)
    ledger = getattr(args, "ledger", None)
    state, epochs = arguments.read_saved_state(args.state, options)
    return Viewer(
        normalise_sources(sources),
        options,
        open_processor(processor),
        world=args.world or 1,
        run=Watched(state=state, epochs_before=epochs, bad=() if ledger is None else tuple(read_ledger(ledger))),
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from vlm_stream.view import ViewServer

    server = ViewServer(open_viewer(args), args.host, args.port)
    output.say(f"viewer: {server.url}")
    if server.token is None:
        output.say(f"from elsewhere: ssh -L {server.port}:127.0.0.1:{server.port} this-machine; Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0
