"""A processor, or the name or path of one."""

from __future__ import annotations

import os
from typing import Any

from vlm_stream.errors import ConfigError

__all__ = ["load_processor"]


def load_processor(processor: Any) -> Any:
    """Return the processor itself, or load it by name or path."""
    if not isinstance(processor, str | os.PathLike):
        return processor
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(os.fspath(processor))  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no processor can be loaded from '{os.fspath(processor)}', so samples cannot be encoded; "
            f"give the folder of a saved processor or a name that transformers knows ({error})"
        ) from error
