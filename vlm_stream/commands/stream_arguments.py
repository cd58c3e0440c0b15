"""Arguments of the commands that plan or stream: which datasets, which recipe, which options.

Options come from a recipe (`--config`), from flags for the usual ones, and from `--set NAME=VALUE` for all others;
later ones win. Values of `--set` are read as YAML.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vlm_stream.commands.common import add_store_arguments, store_options
from vlm_stream.errors import ConfigError
from vlm_stream.options import RUN_ARGUMENTS, LoaderOptions, flag_fields

if TYPE_CHECKING:
    import argparse

__all__ = ["add_stream_arguments", "loader_arguments", "split_options"]

def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """Add datasets, recipe and options."""
    parser.add_argument("datasets", nargs="*", metavar="DATASET", help="folders or URLs, or a recipe (.yaml)")
    parser.add_argument("--config", metavar="YAML", help="a recipe: the arguments of StreamLoader")
    parser.add_argument("--processor", metavar="NAME_OR_PATH", help="the processor that trains")
    group = parser.add_argument_group("plan")
    for option in flag_fields():
        flag = f"--{option.name.replace('_', '-')}"
        group.add_argument(flag, metavar="X", help=option.metadata["help"].removesuffix("."))
    group.add_argument("--world", type=int, metavar="N", help="data-parallel ranks (default: 1)")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other option")
    add_store_arguments(parser)


def loader_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a `StreamLoader` that the command line names."""
    import yaml

    from vlm_stream.recipe import load_config

    recipes = [name for name in args.datasets if name.endswith((".yaml", ".yml"))]
    datasets = [name for name in args.datasets if name not in recipes]
    if len(recipes) + bool(args.config) > 1:
        raise ConfigError(f"two recipes were named ({', '.join([*recipes, args.config or ''])}); give one of them")
    recipe = args.config or next(iter(recipes), None)
    found: dict[str, Any] = load_config(recipe) if recipe else {}
    if datasets:
        found["sources"] = datasets
    if "sources" not in found:
        raise ConfigError("no dataset was named, so there is nothing to plan; give a folder or URL, or --config")
    if args.processor:
        found["processor"] = args.processor
    flags = {option.name: getattr(args, option.name) for option in flag_fields()}
    found |= {name: value for name, value in flags.items() if value is not None}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"'--set {text}' has no '=', so it sets nothing; write --set NAME=VALUE")
        found[name.strip().replace("-", "_")] = yaml.safe_load(value)
    if (store := store_options(args)) is not None:
        found["store"] = store
    return found


def split_options(arguments: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return sources, processor and the options of a stream, without what only a running loader needs."""
    others = (*RUN_ARGUMENTS, *(option.name for option in fields(LoaderOptions)))
    options = {name: value for name, value in arguments.items() if name not in others}
    return arguments["sources"], arguments.get("processor"), options
