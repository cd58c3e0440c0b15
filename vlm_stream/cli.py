"""`vlm-stream`: one entry point, a module per command.

A command is a module of `vlm_stream.commands` with `EXAMPLES`, `add_arguments(parser)` and `run(args) -> exit code`.
Only the module of the command that was asked for is imported, so `--help` and `--version` answer at once.

Exit codes: 0 done, 1 the job failed or found problems, 2 the call, the input or the dataset cannot be used.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Final

from vlm_stream import __version__
from vlm_stream.errors import AccessError, DatasetError, InputError, NotFoundError, VlmStreamError, clean, nearest_name

COMMANDS: Final = {
    "make-shards": "turn JSON, Parquet or meta files and their media into indexed WebDataset shards",
    "index": "write indexes and a manifest for tars made elsewhere",
    "verify": "check every checksum, range and count of a dataset against its tars",
    "recount": "count text tokens again for another processor; tars stay untouched",
    "precount": "write token counts into a data file that is loaded whole",
    "stats": "print the token, size and media histograms of a dataset",
    "plan": "the dry run: fill, steps, balance and requests, from the index alone",
    "where": "which samples a step holds, or at which step a sample is delivered",
    "replay": "rebuild the batches of one step and rank, bit for bit",
    "builders": "start, end and watch a pool of builders on a Ray cluster",
    "chaos": "run a recipe under kills, stops and damage, and compare every batch with the plan",
    "view": "a page in the browser to see samples, packs, steps and runs",
    "show": "samples or a step in the terminal, or as one HTML file",
    "bench": "run a loader without a model and show where the time goes",
    "size": "how many cores a training needs, from a short measurement on your data",
}

_GOES_ON: Final = ("make-shards", "index", "recount")
_UNUSABLE: Final = (InputError, DatasetError, NotFoundError, AccessError)
_EXIT_PROBLEM: Final = 1
_EXIT_USAGE: Final = 2
_EXIT_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-"):
        return _run_bare(arguments)
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        return _fail(f"there is no command '{name}'; {nearest_name(name, COMMANDS)}", _EXIT_USAGE)
    return run_command(name, rest, prog=f"vlm-stream {name}")


def run_command(name: str, arguments: Sequence[str], *, prog: str) -> int:
    """Parse the arguments of one command, run it, and turn its errors into one sentence and an exit code."""
    try:
        return _run_command(name, arguments, prog)
    except KeyboardInterrupt:  # while it works, or before: imports take longer than a user who has seen a typo
        stays = "; what was finished stays, run the same command again to go on" if name in _GOES_ON else ""
        return _fail(f"interrupted{stays}", _EXIT_INTERRUPTED)


def _run_command(name: str, arguments: Sequence[str], prog: str) -> int:
    command = import_module(f"vlm_stream.commands.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(
        prog=prog,
        description=command.__doc__,
        epilog=command.EXAMPLES.replace("\n  ", "\n  vlm-stream "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens, and show tracebacks")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_say_unknown(unknown, parser))
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    try:
        code: int = command.run(args)
        sys.stdout.flush()
    except VlmStreamError as error:
        if args.verbose:
            raise
        return _fail(str(error), _EXIT_USAGE if isinstance(error, _UNUSABLE) else _EXIT_PROBLEM)
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        sys.stderr.close()
        return _EXIT_PROBLEM
    except OSError as error:
        if args.verbose or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
        return _fail(f"the output could not be written ({error.strerror or error}), so it is not whole", _EXIT_PROBLEM)
    return code


def _say_unknown(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Name what is not understood, and the flag that is nearest to the first of it."""
    name = unknown[0].partition("=")[0]
    known = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    close = get_close_matches(name, known, n=1)
    return f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean '{close[0]}'?" if close else "")


def _run_bare(arguments: list[str]) -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="vlm-stream",
        description="Stream vision-language training data from tar shards: plan on metadata, fetch late.",
        epilog=f"commands:\n{listing}\n\n'vlm-stream COMMAND --help' shows a command's options, with examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="vlm-stream [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"vlm-stream {__version__}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0 if arguments else _EXIT_USAGE


def _fail(sentence: str, code: int) -> int:
    sys.stderr.write(f"error: {clean(sentence)}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
