"""`build_processor(family)`: a real transformers processor of config classes and a tokenizer trained on the spot."""

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

from vlm_stream.errors import ConfigError, MissingExtraError, nearest_name
from vlm_stream.testing.families import FAMILY_PARTS, MORE_PARTS
from vlm_stream.testing.tokenizer import train_tokenizer, write_template

FAMILIES: Final = tuple(sorted(FAMILY_PARTS))
"""Families that `build_processor` knows and whose tokens are counted exactly, named as transformers' folders."""

MORE_FAMILIES: Final = tuple(sorted(MORE_PARTS))
"""Further families that `build_processor` knows."""


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
        family: A name of `FAMILIES` or `MORE_FAMILIES`.
        generation_tags: Put the assistant's turns inside `{% generation %}`.
        chat_template: Use this Jinja text instead of the family's own.
        image: Options of the image processor, such as `{"size": {"shortest_edge": 3136, "longest_edge": 50176}}`.
        video: Options of the video processor.
        audio: Options of the feature extractor.

    Returns:
        A transformers processor; `save_pretrained` and `AutoProcessor.from_pretrained` work on it.

    Raises:
        ConfigError: For any other family.
        MissingExtraError: For a family whose class needs a package that is not installed.

    Example:
        >>> processor = build_processor("qwen2_5_vl")
        >>> chat = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        >>> processor.apply_chat_template(chat, tokenize=False).splitlines()[2]
        '<|im_start|>user'
    """
    made = FAMILY_PARTS.get(family) or MORE_PARTS.get(family)
    if made is None:
        known = (*FAMILIES, *MORE_FAMILIES)
        raise ConfigError(
            f"There is no processor family {family!r} here, so none can be built: {nearest_name(family, known)}"
        )
    if made.needs is not None and importlib.util.find_spec(made.needs[0]) is None:
        raise MissingExtraError(*made.needs, f"The processor of {family}")
    parts = {"image_processor": transformers_class(made.image)(**made.image_options | dict(image or {}))}
    for name, value in made.image_attributes.items():
        setattr(parts["image_processor"], name, value)
    if made.video is not None:
        parts["video_processor"] = transformers_class(made.video)(**made.video_options | dict(video or {}))
    if made.audio is not None:
        parts[made.audio_argument] = transformers_class(made.audio)(**made.audio_options | dict(audio or {}))
    parts["tokenizer"] = train_tokenizer(
        (*made.tokens.split(), *made.named.values()),
        eos=made.eos,
        pad=made.pad,
        bos=made.bos,
        add_bos=made.add_bos,
        named_tokens=made.named,
    )
    template = chat_template
    if template is None and made.style is not None:
        template = write_template(made.style, generation_tags=generation_tags)
    return transformers_class(made.processor)(**parts, **made.options, chat_template=template)


def transformers_class(name: str) -> Any:
    """Return a class of transformers; say so when the installed version does not have it."""
    import transformers

    try:
        return getattr(transformers, name)
    except AttributeError:
        raise ConfigError(
            f"transformers {transformers.__version__} has no class {name}, so this family cannot be built. "
            "Upgrade it with: pip install -U transformers"
        ) from None
