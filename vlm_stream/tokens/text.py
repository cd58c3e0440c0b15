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
from vlm_stream.tokens.asker import render
from vlm_stream.tokens.families import Processor, read_family
from vlm_stream.tokens.geometry import Geometry, count_tokens
from vlm_stream.tokens.measure import ask
from vlm_stream.tokens.media import MediaSizes, make_columns
from vlm_stream.tokens.media_text import AUDIO_TEXTS, IMAGE_TEXTS, VIDEO_TEXTS, Scene

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vlm_stream.conversation import Conversation

__all__ = ["TextCounter", "guess_text_tokens"]

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
        self._asker = ask(processor)[0] if self.geometry.is_measured else None
        self._tokenizer: Any = getattr(processor, "tokenizer", processor)
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
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
        """Count one sample whose text holds no control strings: those are the encoder's to disguise.

        Raises:
            BadSampleError: The template shows another number of media than there are sizes.
        """
        ids, surplus = self.encode(render(self.processor, _strip_media(conversation)), sizes)
        return len(ids) - surplus

    def encode(self, text: str, sizes: MediaSizes) -> tuple[list[int], int]:
        """Return the ids of a rendered chat, and how many more they are than the text tokens.

        By rule there is one embedding token for each medium. A processor that is asked gives all of them: the surplus
        is then what `count_tokens` will count for the media.
        """
        if self._asker is not None:
            media = count_tokens(make_columns([sizes], [0]), self.geometry)
            return self._asker.encode(text, sizes, self.geometry.frames), int(media.tokens[0])
        text = self._write_media(text, sizes)
        begin, backend = self._tokenizer.bos_token, self._backend
        adds_special = not begin or not text.startswith(begin)
        if hasattr(backend, "encode_batch_fast") and backend.truncation is None and backend.padding is None:
            # Without the offsets and lists that nobody asks for here.
            return list(backend.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids), 0
        return list(self._tokenizer(text, add_special_tokens=adds_special)["input_ids"]), 0

    def _write_media(self, text: str, sizes: MediaSizes) -> str:
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
                    f"cannot be counted. Look for a {kind} outside of user turns.",
                )
        return str(text)


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
