"""Processors, loaded by name."""

import os
import socket
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from vlm_stream.errors import ConfigError

_CONNECT_S: Final = 5.0


def load_processor(name: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Load a transformers processor, with any options of its `from_pretrained`."""
    if not isinstance(name, str):
        raise ConfigError(
            f"the processor is an object of {type(name).__name__} where a name is wanted, because other processes load "
            f"it again; save it with save_pretrained and give the folder"
        )
    place = Path(name).expanduser()
    if place.is_dir():
        name = str(place)
    elif place.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        beside = [path.name for path in place.parent.iterdir() if path.is_dir()] if place.parent.is_dir() else []
        close = get_close_matches(place.name, beside, n=1)
        raise ConfigError(
            f"the processor '{name}' cannot be loaded (there is no such folder), so nothing can be counted or encoded; "
            + (f"did you mean '{close[0]}'?" if close else "give a folder that save_pretrained has written")
        )
    elif "local_files_only" not in options and not _is_hub_reachable():
        options["local_files_only"] = True  # otherwise the hub's client tries again for minutes
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            name, trust_remote_code=trust_remote_code, **options
        )
    except Exception as error:  # the hub's client, config parsers and remote code raise nearly anything
        first = (str(error).splitlines() or [type(error).__name__])[0]
        asks_for_code = "trust_remote_code" in str(error) and not trust_remote_code
        remote = " It brings its own code: pass trust_remote_code (--trust-remote-code) if you trust it."
        raise ConfigError(
            f"the processor '{name}' cannot be loaded ({first}), so nothing can be counted or encoded. "
            f"Give a name on the hub, or a folder that save_pretrained has written.{remote if asks_for_code else ''}"
        ) from error


def _is_hub_reachable() -> bool:
    """Tell whether the hub's server takes connections; behind a proxy nobody knows, and it counts as reachable."""
    from huggingface_hub import constants

    server = urlsplit(str(constants.ENDPOINT))
    if server.hostname is None or getproxies():
        return True
    try:
        port = server.port or (80 if server.scheme == "http" else 443)
        socket.create_connection((server.hostname, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def open_processor(given: Any) -> Any:
    """Return the processor of a run: an object, or one that is named by name, path, or a mapping with `name`.

    The other entries of a mapping are options of `from_pretrained`.
    """
    if isinstance(given, str | os.PathLike):
        return load_processor(os.fspath(given))
    if not isinstance(given, Mapping):
        return given
    if "name" not in given:
        raise ConfigError("processor is a mapping without 'name', so there is nothing to load; add name: NAME_OR_PATH")
    return load_processor(given["name"], **{key: value for key, value in given.items() if key != "name"})
