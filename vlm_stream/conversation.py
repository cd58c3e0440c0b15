"""The one sample form: a conversation, whose media items name where their bytes are.

    [{"role": "user",      "content": [{"type": "image", "image": "0.jpg"}, {"type": "text", "text": "What is it?"}]},
     {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]

Between rooms a conversation is plain JSON data. A media item is `{"type": medium, medium: where, **extras}`: `where` is
a path or URL in a source, a member name in a shard, and a decoded object once the medium is loaded; a video may also be
a list of frames. Extras such as `frame_indices` and `fps` travel along. This file knows the form and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MEDIA_TYPES", "Conversation", "Item", "Message", "iter_media"]

Item: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]
Conversation: TypeAlias = list[Message]

MEDIA_TYPES: Final = ("image", "video", "audio")


def iter_media(conversation: Conversation) -> Iterator[Item]:
    """Yield the media items in the order in which the conversation shows them."""
    for message in conversation:
        content = message["content"]
        if isinstance(content, list):
            for item in content:
                if item.get("type") in MEDIA_TYPES:
                    yield item
