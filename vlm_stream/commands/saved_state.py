"""`--state`: the state of a run, out of whatever a trainer saved it in."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from vlm_stream.stream import StreamOptions

__all__ = ["add_state_argument", "read_saved_state"]

_WAY_OUT = "save torch.save({'data': loader.state_dict()}, path), or its JSON, and name that"


def add_state_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a saved state."""
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="start from a saved state, not from the start of the run: JSON, a file of torch.save, or the folder of a "
        "checkpoint (torch.distributed.checkpoint, transformers)",
    )


def read_saved_state(path: str | None, options: StreamOptions) -> tuple[dict[str, Any] | None, int]:
    """Return the cursor in a checkpoint, and how many epochs came before its round; without a path, the start."""
    from vlm_stream.stream import RunState, find_states

    if path is None:
        return None, 0
    place = Path(path)
    try:
        checkpoint = _read_folder(place) if place.is_dir() else _read_file(place)
    except OSError as error:
        raise ConfigError(f"the state {path} cannot be read ({error.strerror or error}); check the path") from error
    texts = {json.dumps(state): state for state in find_states(checkpoint)}
    states = [RunState.from_dict(state) for state in texts.values()]
    used = [state for state in states if state.cursor is not None]
    if not states:
        raise ConfigError(f"{path} holds no state of a loader, so there is no place to start from; {_WAY_OUT}")
    if len(used) > 1:
        raise ConfigError(f"{path} holds the states of {len(used)} loaders, and it is not known which; {_WAY_OUT}")
    state = used[0] if used else states[0]
    return state.cursor, state.rounds * (options.epochs or 0)


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
            f"({str(error).splitlines()[0]:.120}); {_WAY_OUT}"
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
