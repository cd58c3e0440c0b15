"""Processors, loaded by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vlm_stream.errors import ConfigError

__all__ = ["load_processor", "open_processor"]


def load_processor(name: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Load a transformers processor, with any options of its `from_pretrained`.

    Raises:
        ConfigError: There is no such processor.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            name, trust_remote_code=trust_remote_code, **options
        )
    except Exception as error:  # the hub's client, config parsers and remote code raise nearly anything
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the processor '{name}' cannot be loaded ({first}), so nothing can be counted or encoded. "
            f"Give a name on the hub, or a folder that save_pretrained has written."
        ) from error


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
