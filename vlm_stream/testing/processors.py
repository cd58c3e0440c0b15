"""`build_processor(family)`: a real transformers processor from its config classes and a tokenizer trained on the spot.

Each family is one function that takes `Parts` and returns the processor; the functions live beside this file, grouped
by what the families read besides images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.testing import audio_processors, vision_processors
from vlm_stream.testing.parts import Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FAMILIES", "build_processor"]

_BUILDERS: Final[dict[str, Callable[[Parts], Any]]] = {
    "gemma3": vision_processors.build_gemma3,
    "gemma4": audio_processors.build_gemma4,
    "gemma4_unified": audio_processors.build_gemma4_unified,
    "glm46v": vision_processors.build_glm46v,
    "internvl": vision_processors.build_internvl,
    "kimi_k25": vision_processors.build_kimi_k25,
    "llava_onevision": vision_processors.build_llava_onevision,
    "nemotron_h_omni": audio_processors.build_nemotron_h_omni,
    "phi4_multimodal": audio_processors.build_phi4_multimodal,
    "qwen2_5_vl": vision_processors.build_qwen2_5_vl,
    "qwen2_vl": vision_processors.build_qwen2_vl,
    "qwen3_omni_moe": audio_processors.build_qwen3_omni_moe,
    "qwen3_vl": vision_processors.build_qwen3_vl,
    "smolvlm": vision_processors.build_smolvlm,
    "step3p7": vision_processors.build_step3p7,
}

FAMILIES: Final = tuple(sorted(_BUILDERS))
"""Families that `build_processor` knows, named as transformers names its folders."""


def build_processor(
    family: str,
    *,
    generation_tags: bool = False,
    chat_template: str | None = None,
    image: Mapping[str, Any] | None = None,
    video: Mapping[str, Any] | None = None,
    audio: Mapping[str, Any] | None = None,
) -> Any:
    """Build a family's real processor without any download.

    Args:
        family: A name of `FAMILIES`.
        generation_tags: Put the assistant's turns inside `{% generation %}`.
        chat_template: Use this Jinja text instead of the family's own.
        image: Options of the image processor, such as `{"size": {"shortest_edge": 3136, "longest_edge": 50176}}`.
        video: Options of the video processor.
        audio: Options of the feature extractor.

    Returns:
        A transformers processor; `save_pretrained` and `AutoProcessor.from_pretrained` work on it.

    Raises:
        ConfigError: For a family that is not in `FAMILIES`.
        MissingExtraError: For a family whose class needs a package that is not installed.

    Example:
        >>> processor = build_processor("qwen2_5_vl")
        >>> chat = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        >>> processor.apply_chat_template(chat, tokenize=False).splitlines()[2]
        '<|im_start|>user'
    """
    if family not in _BUILDERS:
        raise ConfigError(
            f"There is no processor family {family!r} here, so none can be built: {nearest_name(family, FAMILIES)}"
        )
    parts = Parts(
        generation_tags=generation_tags,
        chat_template=chat_template,
        image=dict(image or {}),
        video=dict(video or {}),
        audio=dict(audio or {}),
    )
    return _BUILDERS[family](parts)
