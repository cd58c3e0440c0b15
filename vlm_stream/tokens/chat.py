"""How a processor is used, by counting and by encoding alike: its tokenizer, its chat template, its arguments."""

from collections.abc import Sequence
from typing import Any, Final

from vlm_stream.conversation import Conversation
from vlm_stream.tokens.media import METADATA_READERS

_FLAT_IMAGES: Final = frozenset({"GotOcr2Processor"})
"""Processors to which a list of lists means pages of one document."""
_AUDIO_PARTS: Final = ("audio_processor", "feature_extractor")


def tokenizer_of(processor: Any) -> Any:
    """Return the processor's tokenizer (the processor itself when it is one)."""
    tokenizer = getattr(processor, "tokenizer", None)
    return processor if tokenizer is None else tokenizer  # not `or`: the truth of a tokenizer is its counted vocabulary


def template_of(processor: Any) -> str | None:
    """Return the chat template's text, the processor's own before its tokenizer's."""
    for owner in (processor, tokenizer_of(processor)):
        template = getattr(owner, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default")
        if isinstance(template, str):
            return template
    return None


def render_template(processor: Any, conversation: Conversation) -> str:
    """Render one conversation to text with the processor's template, or with its tokenizer's if it has none."""
    owner = processor if getattr(processor, "chat_template", None) is not None else tokenizer_of(processor)
    if not hasattr(owner, "apply_chat_template"):
        owner = processor
    text = owner.apply_chat_template(conversation, tokenize=False)
    return str(text[0] if isinstance(text, list) else text)


def audio_rate(processor: Any) -> int:
    """Return the samples per second that the processor takes."""
    parts = (getattr(processor, name, None) for name in _AUDIO_PARTS)
    rate = next((rate for part in parts if (rate := getattr(part, "sampling_rate", None))), None)
    return int(rate or getattr(processor, "audio_sampling_rate", None) or 16000)


def special_tokens(processor: Any, text: str) -> dict[str, bool]:
    """Return the option for a rendered text: its template may have written the first special token already."""
    begin = getattr(tokenizer_of(processor), "bos_token", None)
    return {"add_special_tokens": False} if begin is not None and text.startswith(begin) else {}


def call_arguments(
    processor: Any,
    text: str,
    *,
    images: Sequence[Sequence[Any]] = (),
    videos: Sequence[Sequence[Any]] = (),
    metadata: Any = None,
    audios: Sequence[Any] = (),
) -> dict[str, Any]:
    """Return what a processor is called with besides texts, of which `text` is the first; media are lists of samples'.

    `metadata` is of all videos in a row, and so are `audios`.
    """
    arguments: dict[str, Any] = special_tokens(processor, text)
    name = type(processor).__name__
    if any(images):
        arguments["images"] = [image for each in images for image in each] if name in _FLAT_IMAGES else list(images)
    if any(videos):
        arguments |= {"videos": list(videos), "do_sample_frames": False, "video_metadata": metadata}
        if name in METADATA_READERS:
            arguments["return_metadata"] = True
    if audios:
        arguments |= {"audio": list(audios), "sampling_rate": audio_rate(processor)}
    return arguments
