"""Exact text counts: a conversation and the sizes of its media enter, the tokens of everything but embeddings leave.

    text_tokens = tokens of the rendered chat + what the processor writes around media, one token for every medium

The conversation is rendered and tokenised once, as the processor's own `apply_chat_template` would do it: special
tokens are added unless the template has written the first of them. No pixel is needed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vlm_stream.conversation import MEDIA_TYPES, iter_media
from vlm_stream.errors import BadSampleError
from vlm_stream.tokens.families import Processor, read_family
from vlm_stream.tokens.geometry import Geometry
from vlm_stream.tokens.media_text import AUDIO_TEXTS, IMAGE_TEXTS, VIDEO_TEXTS, Scene
from vlm_stream.tokens.sizes import MediaSizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vlm_stream.conversation import Conversation

__all__ = ["TextCounter", "count_text_tokens", "guess_text_tokens"]

CHARACTERS_PER_TOKEN = 3
_NO_MEDIA = MediaSizes()


class TextCounter:
    """Counts the text of many samples for one processor.

    Example:
        >>> from vlm_stream.testing import build_processor
        >>> counter = TextCounter(build_processor("qwen2_5_vl"))
        >>> counter.count([{"role": "user", "content": "Hello world"}])
        18
    """

    def __init__(self, processor: Processor, geometry: Geometry | None = None) -> None:
        """Learn the processor's media tokens.

        Args:
            processor: A transformers processor, or a bare tokenizer.
            geometry: Its geometry, if another sampling of frames is wanted than its own.
        """
        self.processor = processor
        self.geometry = Geometry.from_processor(processor) if geometry is None else geometry
        self._tokenizer: Any = getattr(processor, "tokenizer", processor)
        # Some classes lose their template when they are loaded from a folder; their tokenizer keeps it.
        own, spare = (getattr(part, "chat_template", None) for part in (processor, self._tokenizer))
        self._template = {"chat_template": spare} if own is None and spare is not None else {}
        family = read_family(processor)
        self._writers: dict[str, Any] = {
            "image": IMAGE_TEXTS.get(family),
            "video": VIDEO_TEXTS.get(family),
            "audio": AUDIO_TEXTS.get(family),
        }
        tokens = {kind: getattr(processor, f"{kind}_token", None) for kind in MEDIA_TYPES}
        self._pattern = re.compile(
            "|".join(f"(?P<{kind}>{re.escape(token)})" for kind, token in tokens.items() if token) or r"(?!)"
        )

    def count(self, conversation: Conversation, sizes: MediaSizes = _NO_MEDIA) -> int:
        """Count one sample.

        Raises:
            BadSampleError: The template shows another number of media than there are sizes.
        """
        return self.count_batch([(conversation, sizes)])[0]

    def count_batch(self, samples: Sequence[tuple[Conversation, MediaSizes]]) -> list[int]:
        """Count many samples with one call of the tokenizer."""
        texts = [self.render(conversation, sizes) for conversation, sizes in samples]
        counts = [0] * len(texts)
        begin = self._tokenizer.bos_token
        for adds_special in (False, True):
            places = [
                place for place, text in enumerate(texts) if (not begin or not text.startswith(begin)) == adds_special
            ]
            encoded = self._encode([texts[place] for place in places], adds_special) if places else ()
            for place, ids in zip(places, encoded, strict=True):
                counts[place] = len(ids)
        return counts

    def token_ids(self, text: str) -> list[int]:
        """Return the ids of a text that `render` or `write_media` gave: as many as `count` says."""
        begin = self._tokenizer.bos_token
        (ids,) = self._encode([text], not begin or not text.startswith(begin))
        return list(getattr(ids, "ids", ids))

    def _encode(self, texts: list[str], adds_special: bool) -> Sequence[Any]:
        """Return for each text its ids, or what has them as `ids` and is as long."""
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if hasattr(backend, "encode_batch_fast") and backend.truncation is None and backend.padding is None:
            # Without the offsets and lists that nobody asks for here.
            return list(backend.encode_batch_fast(texts, add_special_tokens=adds_special))
        return list(self._tokenizer(texts, add_special_tokens=adds_special)["input_ids"])

    def render(self, conversation: Conversation, sizes: MediaSizes = _NO_MEDIA) -> str:
        """Return the text that is tokenised: as the processor writes it, with one embedding token for each medium."""
        text = self.processor.apply_chat_template([_strip_media(conversation)], tokenize=False, **self._template)
        return self.write_media(text if isinstance(text, str) else text[0], sizes)

    def write_media(self, text: str, sizes: MediaSizes) -> str:
        """Return a rendered chat with what the processor writes for media, one embedding token for each of them."""
        queues: dict[str, Sequence[Any]] = {"image": sizes.images, "video": sizes.videos, "audio": sizes.audios}
        found = dict.fromkeys(queues, 0)
        scene = Scene(self.geometry, sizes)

        def write(match: re.Match[str]) -> str:
            kind = str(match.lastgroup)
            found[kind] += 1
            if found[kind] > len(queues[kind]):
                return match.group()
            writer = self._writers[kind]
            return writer(self.processor, queues[kind][found[kind] - 1], scene) if writer else match.group()

        text = self._pattern.sub(write, text)
        for kind, queue in queues.items():
            if found[kind] != len(queue):
                raise BadSampleError(
                    "convert",
                    "media_mismatch",
                    f"The chat template shows {found[kind]} {kind}s where the sample has {len(queue)}, so its tokens "
                    f"cannot be counted. Look for a {kind} outside of user turns, or its token typed as text.",
                )
        return str(text)


def count_text_tokens(
    conversation: Conversation,
    processor: Processor | None = None,
    sizes: MediaSizes = _NO_MEDIA,
    geometry: Geometry | None = None,
) -> int:
    """Count one sample's text; exact with a processor, a guess without. Use a `TextCounter` for more than a few.

    >>> count_text_tokens([{"role": "user", "content": "eleven char"}])
    3
    """
    if processor is None:
        return guess_text_tokens(conversation)
    return TextCounter(processor, geometry).count(conversation, sizes)


def guess_text_tokens(conversation: Conversation) -> int:
    """Return a third of the characters, plus one for every medium.

    The one keeps the arithmetic of `count_tokens`: media are counted by geometry and their placeholders taken away.
    """
    characters = sum(len(text) for text in _iter_texts(conversation))
    return characters // CHARACTERS_PER_TOKEN + sum(1 for _ in iter_media(conversation))


def _iter_texts(conversation: Conversation) -> Iterable[str]:
    for message in conversation:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (item["text"] for item in content if item.get("type") == "text")


def _strip_media(conversation: Conversation) -> Conversation:
    """Return the conversation without what its media items name: a template needs only their kind."""
    return [
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [
                {"type": item["type"]} if item.get("type") in MEDIA_TYPES else item for item in message["content"]
            ],
        }
        for message in conversation
    ]
