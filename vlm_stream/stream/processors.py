"""The processor of a run: an object, a name or path, or a mapping with `name` and options of `from_pretrained`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vlm_stream.errors import ConfigError
from vlm_stream.processors import load_processor

__all__ = ["open_processor"]


def open_processor(given: Any) -> Any:
    """Return the processor that the user means."""
    if isinstance(given, str | os.PathLike):
        return load_processor(os.fspath(given))
    if not isinstance(given, Mapping):
        return given
    if "name" not in given:
        raise ConfigError("processor is a mapping without 'name', so there is nothing to load; add name: NAME_OR_PATH")
    return load_processor(given["name"], **{key: value for key, value in given.items() if key != "name"})
