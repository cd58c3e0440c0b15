"""A small white image for samples without media, so that every rank runs its vision tower; attention never sees it.

Enters: a conversation, later the ids made of it. Leaves: a copy with the image in its first user turn; an attention
mask that is 0 on every vision token. Packing must keep these zeros.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.encode.media_tokens import vision_token_ids

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from vlm_stream.conversation import Conversation

__all__ = [
    "FAKE_IMAGE_NAME",
    "FAKE_IMAGE_SIZE",
    "has_media",
    "inject_fake_image",
    "make_fake_image",
    "mask_vision_tokens",
]

logger = logging.getLogger(__name__)

FAKE_IMAGE_SIZE: Final = 56
"""Height and width; a processor may enlarge it to its own minimum."""
FAKE_IMAGE_NAME: Final = "fake.png"
"""What the injected item names instead of a member."""

_warned: set[str] = set()


def has_media(conversation: Conversation) -> bool:
    """Say whether any content item is an image or a video, by its type or by its keys."""
    return any(
        isinstance(item, dict) and (item.get("type") in ("image", "video") or "image" in item or "video" in item)
        for message in conversation
        if isinstance(message.get("content"), list)
        for item in message["content"]
    )


def make_fake_image() -> Image.Image:
    """Return the image."""
    from PIL import Image

    return Image.new("RGB", (FAKE_IMAGE_SIZE, FAKE_IMAGE_SIZE), (255, 255, 255))


def inject_fake_image(conversation: Conversation, image: Any = FAKE_IMAGE_NAME) -> Conversation:
    """Return a copy whose first user turn begins with the image; a turn is added when there is none."""
    item = {"type": "image", "image": image}
    messages = [dict(message) for message in conversation]
    for message in messages:
        if message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = [item, *content]
        elif isinstance(content, str):
            message["content"] = [item, {"type": "text", "text": content}]
        else:
            message["content"] = [item]
        return messages
    return [{"role": "user", "content": [item]}, *messages]


def mask_vision_tokens(processor: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the mask with 0 wherever the ids are vision tokens; both have the same shape."""
    import torch

    ids = vision_token_ids(processor)
    if not ids:
        name = type(processor).__name__
        if name not in _warned:
            _warned.add(name)
            logger.warning("%s names no vision tokens: fake images stay visible to attention.", name)
        return attention_mask
    vision = torch.isin(input_ids, torch.tensor(sorted(ids), device=input_ids.device))
    return attention_mask.masked_fill(vision, 0)
