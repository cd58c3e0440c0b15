"""How a processor is used: its tokenizer, its chat template, its arguments, and the settings of its parts."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from vlm_stream.conversation import Conversation
from vlm_stream.errors import ConfigError

_FLAT_IMAGES: Final = frozenset({"GotOcr2Processor"})
"""Processors to which a list of lists means pages of one document."""
METADATA_READERS: Final = frozenset({"Cosmos3EdgeProcessor", "MuseGlimmerProcessor", "MuseSparkProcessor"})
"""Processors that read a clip's metadata back from their video part, and do not ask it to return them."""
PARTS: Final = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
"""What processors call their part for a medium."""
_KEYWORDS: Final = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}


class Processor(Protocol):
    """What is asked of every transformers processor, and of a bare tokenizer in its place."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batch of texts and media."""

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the text, or the batch, of a conversation."""


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


def media_of(processor: Any) -> list[str]:
    """Return the media that the processor has a part for."""
    return [kind for kind, names in PARTS.items() if any(getattr(processor, name, None) is not None for name in names)]


def audio_rate(processor: Any) -> int:
    """Return the samples per second that the processor takes."""
    parts = (getattr(processor, name, None) for name in PARTS["audio"])
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


class Part:
    """One part of a processor, seen as its processor will call it: class-wide defaults win over the part's config."""

    def __init__(self, processor: Any, medium: str) -> None:
        names = PARTS[medium]
        found = [(name, part) for name in names if (part := getattr(processor, name, None)) is not None]
        self.exists = bool(found)
        self._part: Any = found[0][1] if found else None
        declared = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", None) or {}
        self._overrides = declared.get(_KEYWORDS[medium], {})
        self._owner = f"{type(processor).__name__}.{found[0][0] if found else names[0]}"

    def read(self, name: str, default: Any = None) -> Any:
        """Return a setting; a present None reads as the default."""
        value = self._overrides.get(name)
        if value is None:
            value = getattr(self._part, name, None)
        return default if value is None else value

    def whole(self, name: str) -> int:
        return int(self.read(name))

    def ints(self, *names: str, **others: str) -> dict[str, int]:
        """Return whole numbers: fields of a rule; others than their settings are given with the names of these."""
        return {
            field: int(self.read(name)) for field, name in {**dict(zip(names, names, strict=True)), **others}.items()
        }

    def read_size(self, *names: str) -> int:
        """Return the first of these keys that the part's `size` (a dict or an object) holds."""
        size = self.read("size")
        for name in names:
            value = size.get(name) if hasattr(size, "get") else getattr(size, name, None)
            if value:
                return int(value)
        raise ConfigError(
            f"{self._owner} has no {' or '.join(names)} in its size ({size!r}), so its tokens cannot be counted. "
            "Complete the processor's config."
        )

    def grid(self) -> dict[str, int]:
        """Return patches and limits of a Qwen-like part; old versions keep limits as attributes beside `size`."""
        return {
            **self.ints("patch_size", "merge_size"),
            "min_pixels": int(self.read("min_pixels") or self.read_size("min_pixels", "shortest_edge")),
            "max_pixels": int(self.read("max_pixels") or self.read_size("max_pixels", "longest_edge")),
        }

    def cap(self) -> int | None:
        """Return the tokens that frames must share, if the cap of Qwen's video processors is on."""
        return int(self.read("max_video_tokens")) if self.read("cap_pixels_per_frame") else None

    def rate(self) -> dict[str, int]:
        return {"sampling_rate": int(self.read("sampling_rate", 16000))}
