"""Text tokens of a sample: exact with a processor, estimated without.

Enters: the name of a processor, or None; then conversations with the sizes of their media. Leaves: counts, and the note
for the manifest of how they came about. A processor is loaded once per process.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from vlm_stream.conversation import iter_media
from vlm_stream.errors import ConfigError
from vlm_stream.shards.manifest import TokenCounting

if TYPE_CHECKING:
    from vlm_stream.conversation import Conversation
    from vlm_stream.shards.rows import MediaSizes

__all__ = ["EstimatingCounter", "TextCounter", "open_counter"]


class TextCounter(Protocol):
    """Counts the text tokens of samples."""

    @property
    def note(self) -> TokenCounting:
        """Return how the counts come about."""
        ...

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> int:
        """Return the tokens of one sample without its media, one for every media placeholder.

        Raises:
            BadSampleError: The processor refuses the sample.
        """
        ...


class EstimatingCounter:
    """A third of the characters; what the record itself brings along is taken before that."""

    @property
    def note(self) -> TokenCounting:
        """Return that counts are estimates."""
        return TokenCounting(kind="estimated")

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> int:  # noqa: ARG002
        """Return `known` if it is a count, else characters // 3; and one for every media item."""
        num_media = sum(1 for _ in iter_media(conversation))
        if isinstance(known, int) and not isinstance(known, bool) and known >= 0:
            return known + num_media
        return sum(map(_num_chars, conversation)) // 3 + num_media


def _num_chars(message: dict[str, Any]) -> int:
    content = message["content"]
    if isinstance(content, str):
        return len(content)
    return sum(len(item["text"]) for item in content if item.get("type") == "text")


@cache
def open_counter(processor: str | None) -> TextCounter:
    """Return the counter for a processor's name or path; loaded once per process.

    Raises:
        ConfigError: There is no such processor.
    """
    if processor is None:
        return EstimatingCounter()
    raise ConfigError(f"The processor '{processor}' cannot be loaded.")


def _template_digest(processor: Any) -> str:
    template = getattr(processor, "chat_template", None) or getattr(
        getattr(processor, "tokenizer", None), "chat_template", None
    )
    return hashlib.sha256(str(template).encode()).hexdigest() if template else ""
