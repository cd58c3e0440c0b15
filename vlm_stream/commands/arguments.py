"""Arguments that commands share: stores, output, workers, and what plans and streams are made of.

Options of a stream come from a recipe (`--config`), from flags for the usual ones, and from `--set NAME=VALUE` for all
others; later ones win. Values of `--set` are read as YAML. `--state` takes a state out of what a trainer saved it in.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import ConfigError
from vlm_stream.loader_options import LoaderOptions
from vlm_stream.options import RUN_ARGUMENTS, StreamOptions, flag_fields
from vlm_stream.recipe import load_config, normalise_sources
from vlm_stream.schema import check_names, parse_size

if TYPE_CHECKING:
    from vlm_stream.media import MediaLimits
    from vlm_stream.planning import Plan
    from vlm_stream.storage import StoreOptions

_WAY_OUT: Final = "save torch.save({'data': loader.state_dict()}, path), or its JSON, and name that"


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how to reach object stores; credentials come from the environment and the profile alone."""
    group = parser.add_argument_group("object stores")
    group.add_argument("--endpoint", metavar="URL", help="server of an S3-compatible store")
    group.add_argument("--region", help="S3 region")
    group.add_argument("--anonymous", action="store_true", help="send unsigned requests, for public buckets")
    group.add_argument("--allow-http", action="store_true", help="accept an endpoint without TLS")
    group.add_argument(
        "--tars",
        metavar="URL",
        action="append",
        help="a folder or bucket that a manifest may name as the place of its tars, where it is not its own",
    )


def store_options(args: argparse.Namespace) -> StoreOptions | None:
    """Return the store options that the arguments name, None where they name none."""
    from vlm_stream.storage import StoreOptions

    if not (args.endpoint or args.region or args.anonymous or args.allow_http or args.tars):
        return None
    return StoreOptions(
        endpoint=args.endpoint,
        region=args.region,
        anonymous=args.anonymous,
        allow_http=args.allow_http,
        tars=tuple(args.tars or ()),
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the result as one JSON object, and no progress")
    group.add_argument("--quiet", action="store_true", help="no progress")


def add_workers_argument(parser: argparse.ArgumentParser) -> None:
    """Add the number of processes."""
    parser.add_argument(
        "--workers", type=int, metavar="N", help="shards at a time (default: up to the cores, if the work is worth it)"
    )


def add_form_arguments(group: argparse._ActionsContainer) -> None:
    """Add what the records of data files are like, where it is not recognised, and where their media are."""
    group.add_argument(
        "--columns", metavar="NAME=FIELD,...", help="columns of a data file, where they are not recognised"
    )
    group.add_argument("--tags", metavar="NAME=VALUE,...", help="role keys and roles of a data file, likewise")
    group.add_argument("--media-dir", metavar="DIR", help="what media paths of a data file are relative to")
    group.add_argument(
        "--media-first", action="store_true", help="media that no <image> shows go before the first user text"
    )
    group.add_argument(
        "--media-hosts",
        default="public",
        metavar="HOST,...",
        help="web hosts that records may name; public: those with public addresses (default: %(default)s)",
    )


def parse_names(text: str) -> tuple[str, ...]:
    """Read `a,b`."""
    return tuple(filter(None, text.split(",")))


def parse_bytes(text: str) -> int:
    """Read a number of bytes for argparse, which shows no other error's sentence."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_count(text: str) -> int:
    """Read a whole number of at least 1 for argparse."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of things; give a whole number of at least 1")
    return int(text)


def parse_duration(text: str) -> float:
    """Read seconds or minutes for argparse: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no length of time; give a number above 0")
    return number


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


def media_limits(text: str | None) -> MediaLimits | None:
    """Return the limits that `image_pixels=5000000,file_bytes=2GiB` names, None where it names none."""
    from vlm_stream.media import MediaLimits

    given = {name: parse_size(value) for name, value in parse_mapping(text).items()}
    check_names(MediaLimits, given, prefix="media_limits.")
    return MediaLimits(**given) if given else None


def add_processor_arguments(parser: argparse.ArgumentParser, help_text: str, *, required: bool = False) -> None:
    """Add the name of a processor, and whether its code may run."""
    parser.add_argument("--processor", required=required, metavar="NAME_OR_PATH", help=help_text)
    parser.add_argument("--trust-remote-code", action="store_true", help="let the processor bring its own code")


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """Add datasets, recipe and options."""
    parser.add_argument("datasets", nargs="*", metavar="DATASET", help="folders or URLs, or a recipe (.yaml)")
    parser.add_argument("--config", metavar="YAML", help="a recipe: the arguments of StreamLoader")
    add_processor_arguments(parser, "the processor that trains")
    group = parser.add_argument_group("plan")
    for option in flag_fields():
        flag = f"--{option.name.replace('_', '-')}"
        group.add_argument(flag, metavar="X", help=option.metadata["help"].removesuffix("."))
    group.add_argument("--world", type=parse_count, metavar="N", help="data-parallel ranks (default: 1)")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other option")
    add_store_arguments(parser)


def loader_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a `StreamLoader` that the command line names."""
    import yaml

    recipes = [name for name in args.datasets if name.endswith((".yaml", ".yml")) and not _is_blend(name)]
    datasets = [name for name in args.datasets if name not in recipes]
    if len(recipes) + bool(args.config) > 1:
        both = ", ".join(filter(None, [*recipes, args.config]))
        raise ConfigError(f"two recipes were named ({both}); give one of them")
    recipe = args.config or next(iter(recipes), None)
    found: dict[str, Any] = load_config(recipe) if recipe else {}
    if datasets:
        found["sources"] = datasets
    if "sources" not in found:
        raise ConfigError("no dataset was named, so there is nothing to plan; give a folder or URL, or --config")
    if args.processor:
        found["processor"] = args.processor
    if args.trust_remote_code:
        named = found.get("processor")
        found["processor"] = {"name": named} if isinstance(named, str) else dict(named or {})
        found["processor"]["trust_remote_code"] = True
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


def _is_blend(name: str) -> bool:
    """Tell a metadataset of Energon from a recipe, by what is in it."""
    import yaml

    try:
        data = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # said by whoever reads it
        return "://" in name
    return isinstance(data, dict) and "splits" in data and "sources" not in data


def split_options(arguments: dict[str, Any]) -> tuple[Any, Any, StreamOptions]:
    """Return sources, processor and the options of a stream; what only a running loader needs is checked, too."""
    own = {option.name: arguments[option.name] for option in fields(LoaderOptions) if option.name in arguments}
    LoaderOptions(**own)
    others = (*RUN_ARGUMENTS, *own)
    options = {name: value for name, value in arguments.items() if name not in others}
    if arguments.get("device") is not None:  # builders then send what is finished there
        options = {"pixels": "compact"} | options
    return arguments["sources"], arguments.get("processor"), StreamOptions.parse(options)


def open_plan(given: dict[str, Any]) -> tuple[Plan, StreamOptions]:
    """Open the datasets that the arguments of a loader name, and plan over them."""
    from vlm_stream.planning import open_plan
    from vlm_stream.processors import open_processor

    sources, processor, options = split_options(given)
    return open_plan(normalise_sources(sources), options, open_processor(processor)), options


def need_processor(given: dict[str, Any]) -> None:
    """Refuse arguments that name no processor, for commands that build batches; `null` is a choice."""
    if "processor" not in given:
        raise ConfigError("batches cannot be encoded without a processor; name it with --processor or in the recipe")


def device_dtype(arguments: dict[str, Any]) -> Any:
    """Return the type of pixels that a loader finishes on its device, None where it has none."""
    from vlm_stream.pixels import DEFAULT_DTYPE

    own = {name: arguments[name] for name in ("device", "dtype") if name in arguments}
    loader = LoaderOptions(**own)
    return None if loader.device is None else loader.pixel_dtype or DEFAULT_DTYPE


def add_state_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a saved state."""
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="start from a saved state, not from the start of the run: JSON, a file of torch.save, or the folder of a "
        "checkpoint (torch.distributed.checkpoint, transformers)",
    )


def read_saved_state(path: str | None, options: StreamOptions) -> tuple[dict[str, Any] | None, int]:
    """Return a checkpoint's state of the plan, and how many epochs came before its round; without a path, the start."""
    from vlm_stream.state import RunState, find_states

    if path is None:
        return None, 0
    place = Path(path)
    try:
        checkpoint = _read_folder(place) if place.is_dir() else _read_file(place)
    except OSError as error:
        raise ConfigError(f"the state {path} cannot be read ({error.strerror or error}); check the path") from error
    texts = {json.dumps(state): state for state in find_states(checkpoint)}
    states = [RunState.from_dict(state) for state in texts.values()]
    used = [state for state in states if state.plan is not None]
    if not states:
        raise ConfigError(f"{path} holds no state of a loader, so there is no place to start from; {_WAY_OUT}")
    if len(used) > 1:
        raise ConfigError(f"{path} holds the states of {len(used)} loaders, and it is not known which; {_WAY_OUT}")
    state = used[0] if used else states[0]
    return state.plan, state.rounds * (options.epochs or 0)


def _read_file(path: Path) -> Any:
    """Read JSON, or what torch.save wrote; nothing of it is executed."""
    with path.open("rb") as file:
        is_json = file.read(1) == b"{"
    if is_json:
        try:
            found = json.loads(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"the state {path} is not JSON ({error}); {_WAY_OUT}") from error
        return {"vlm_stream": path.read_text(encoding="utf-8").strip()} if "checksum" in found else found
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the bytes happen to make it raise
        raise ConfigError(
            f"{path} is neither JSON nor a file of torch.save that can be read without running code in it "
            f"({next(iter(str(error).splitlines()), 'it is empty'):.120}); {_WAY_OUT}"
        ) from error


def _read_folder(path: Path) -> Any:
    """Read the state out of a checkpoint's folder."""
    own = path / "vlm_stream.json"
    if own.is_file():
        return _read_file(own)
    if not (path / ".metadata").is_file():
        raise ConfigError(f"the folder {path} is no checkpoint with a loader's state in it; {_WAY_OUT}")
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    entries = [name for name in reader.read_metadata().state_dict_metadata if name.split(".")[-1] == "vlm_stream"]
    found: dict[str, Any] = dict.fromkeys(entries, "")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .*uninitialized")  # no_dist says so already
        load(found, storage_reader=reader, no_dist=True)
    return [{"vlm_stream": text} for text in found.values()]
