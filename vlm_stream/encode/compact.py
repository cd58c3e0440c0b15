"""The compact path of a processor, or one line in the log that says why pixels stay full."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_stream.pixels import CompactPath

__all__ = ["find_compact_path"]

logger = logging.getLogger(__name__)


def find_compact_path(processor: Any) -> CompactPath | None:
    """Return the path; None, and a line in the log for the first processor of its kind, where there is none."""
    from vlm_stream.pixels.path import CompactPath

    path, reason = CompactPath.for_processor(processor)
    if path is None:
        _say_once(reason)
    return path


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    logger.warning("Pixels stay full, as the processor gives them: %s.", reason)
