"""Which collate function a processor's class gets, and how users add their own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.collate.default import default_collate_fn
from vlm_stream.collate.kimi_k25 import kimi_k25_vl_collate_fn
from vlm_stream.collate.kimi_vl import kimi_vl_collate_fn
from vlm_stream.collate.llava_onevision import llava_onevision_collate_fn
from vlm_stream.collate.nemotron_omni import nemotron_omni_collate_fn
from vlm_stream.collate.nemotron_parse import nemotron_parse_collate_fn
from vlm_stream.collate.qwen2_5 import qwen2_5_collate_fn
from vlm_stream.collate.qwen3_omni import qwen3_omni_collate_fn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COLLATE_FNS", "get_collate", "register_collate"]

logger = logging.getLogger(__name__)

COLLATE_FNS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "Qwen2_5_VLProcessor": qwen2_5_collate_fn,
    "Qwen3OmniMoeProcessor": qwen3_omni_collate_fn,
    "KimiVLProcessor": kimi_vl_collate_fn,
    "KimiK25Processor": kimi_k25_vl_collate_fn,
    "Kimi_K25Processor": kimi_k25_vl_collate_fn,  # the class inside transformers
    "NemotronParseProcessor": nemotron_parse_collate_fn,
    "NemotronH_Nano_Omni_Reasoning_V3Processor": nemotron_omni_collate_fn,
    "NemotronH_Omni_Reasoning_V3Processor": nemotron_omni_collate_fn,  # the class inside transformers
    "LlavaOneVisionProcessor": llava_onevision_collate_fn,
    "LlavaOnevisionProcessor": llava_onevision_collate_fn,  # the class inside transformers
    "default": default_collate_fn,
}
"""Class name of a processor -> its collate function."""


def get_collate(processor: Any) -> Callable[..., dict[str, Any]]:
    """Return the function of the processor's class; the default one (and a warning) for classes nobody registered."""
    name = type(processor).__name__
    if name not in COLLATE_FNS:
        logger.warning("No collate function is registered for %s; the default one is used.", name)
    return COLLATE_FNS.get(name, default_collate_fn)


def register_collate(
    class_name: str,
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., dict[str, Any]]]:
    """Register a collate function for a processor class, in place of any other.

    Example:
        >>> @register_collate("MyProcessor")
        ... def my_collate_fn(examples, processor):
        ...     return {}
    """

    def register(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        COLLATE_FNS[class_name] = function
        return function

    return register
