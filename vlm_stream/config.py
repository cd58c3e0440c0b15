"""A YAML recipe -> the arguments of a loader.

A recipe's keys are the arguments of `StreamLoader`; nothing else. Paths are relative to the working directory, as on a
command line. Nothing is opened here and the environment is not read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vlm_stream.errors import ConfigError

__all__ = ["load_config"]


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a recipe.

    Raises:
        ConfigError: It cannot be read, is not a mapping, or lacks `sources` or `processor`.
    """
    import yaml

    name = os.fspath(path)
    try:
        data = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the recipe {name} cannot be read ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {name} is not YAML, so nothing of it can be used: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"the recipe {name} holds {type(data).__name__}, not a mapping; write the arguments of StreamLoader, one "
            f"'name: value' a line"
        )
    for key in ("sources", "processor"):
        if key not in data:
            raise ConfigError(f"the recipe {name} has no '{key}', so there is nothing to stream; add {key}: ...")
    return {str(key): value for key, value in data.items()}
