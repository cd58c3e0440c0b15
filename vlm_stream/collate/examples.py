"""What the collate functions read from examples: conversations, media counts, fake-image flags, lengths.

Enters: examples as datasets give them, `{"conversation": [...], ...}`. Leaves: numbers and selections; nothing here
changes an example.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vlm_stream.conversation import iter_media
from vlm_stream.encode import chat_format, mask_vision_tokens, render_template, shape_content, tokenizer_of
from vlm_stream.media import probe_image
from vlm_stream.tokens import Geometry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.conversation import Conversation

__all__ = ["conversations_of", "count_media", "count_media_tokens", "drop_overlong", "mask_fake_images"]

logger = logging.getLogger(__name__)


def conversations_of(examples: Sequence[Mapping[str, Any]]) -> list[Conversation]:
    """Return the conversations of a batch."""
    return [example["conversation"] for example in examples]


def count_media(conversations: Sequence[Conversation]) -> dict[str, torch.Tensor]:
    """Return `n_images_per_sample` and `n_videos_per_sample` [B], each only if some row has that medium."""
    counts = {}
    for medium, key in (("image", "n_images_per_sample"), ("video", "n_videos_per_sample")):
        numbers = [sum(item["type"] == medium for item in iter_media(chat)) for chat in conversations]
        if any(numbers):
            counts[key] = torch.tensor(numbers, dtype=torch.int64)
    return counts


def mask_fake_images(batch: dict[str, Any], examples: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
    """Return the batch with the vision tokens of rows flagged `_injected_fake` hidden from attention."""
    faked = torch.tensor([bool(example.get("_injected_fake")) for example in examples])
    if not bool(faked.any()) or "attention_mask" not in batch:
        return batch
    hidden = mask_vision_tokens(processor, batch["input_ids"], batch["attention_mask"])
    return batch | {"attention_mask": torch.where(faked[:, None], hidden, batch["attention_mask"])}


def drop_overlong(
    conversations: Sequence[Conversation], processor: Any, max_length: int
) -> tuple[list[Conversation], list[int]]:
    """Return the conversations that are estimated to fit, and their places in the batch.

    Raises:
        ValueError: When none fits.
    """
    kept = []
    for index, conversation in enumerate(conversations):
        try:
            total = _num_text_tokens(conversation, processor) + count_media_tokens(conversation, processor)
        except Exception as error:  # an estimate must not lose a sample
            logger.debug("Row %d could not be estimated and is kept: %r", index, error)
            total = 0
        if total > max_length:
            logger.warning("Dropped row %d of a batch: about %d tokens, more than %d.", index, total, max_length)
        else:
            kept.append(index)
    if not kept:
        raise ValueError(f"All {len(conversations)} samples of the batch exceed max_length={max_length}.")
    return [conversations[index] for index in kept], kept


def _num_text_tokens(conversation: Conversation, processor: Any) -> int:
    text = render_template(processor, shape_content(conversation, chat_format(processor)))
    return len(tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"])


def count_media_tokens(conversation: Conversation, processor: Any) -> int:
    """Return how many tokens the images add to the one placeholder that each has in the text."""
    images = [item["image"] for item in iter_media(conversation) if item["type"] == "image"]
    if not images:
        return 0
    sizes = [(i.height, i.width) if hasattr(i, "height") else probe_image(i) for i in images]
    geometry = Geometry.from_processor(processor)
    if geometry.is_exact and geometry.image is not None:
        heights, widths = np.asarray(sizes, dtype=np.int64).T
        counts = geometry.image.count_images(heights, widths, np.full(len(images), len(images), dtype=np.int64))
        return int(counts.tokens.sum()) - len(images)
    from vlm_stream.mapstyle.estimate import estimate_image_tokens, extract_image_config

    config = extract_image_config(processor)
    return sum(estimate_image_tokens(list(size), config) - 1 for size in sizes) if config is not None else 0
