"""Conversations through one call of the processor, and labels for every row.

Enters: examples `{"conversation": [...], ...}` (media as paths, bytes or decoded objects) and the processor. Leaves:
the padded batch as the processor gives it, plus `labels` `[B, S]` that are not shifted yet. Examples are never changed.
Which keys a family wants is not known here.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch

from vlm_stream.collate.estimate import estimate_image_tokens, extract_image_config
from vlm_stream.collate.media import merge_media
from vlm_stream.collate.rows import pad_id_of, pad_rows, padding_side, split_rows
from vlm_stream.conversation import Conversation, iter_media
from vlm_stream.encode import (
    SHARED_PIXELS,
    EncodeConfig,
    Encoder,
    Steps,
    chat_format,
    load_media,
    mask_vision_tokens,
    render_template,
    shape_content,
    tokenizer_of,
)
from vlm_stream.keys import IGNORE, INJECTED_FAKE_KEY
from vlm_stream.media import probe_image
from vlm_stream.tokens import Geometry

logger = logging.getLogger(__name__)

Example: TypeAlias = Mapping[str, Any]
PixelForm: TypeAlias = Literal["full", "compact"]


_AUDIO_PLACES: Final = re.compile(r"<\|audio(?:_\d+)?\|>|<\|endoftext11\|>")
"""How texts place a clip that stands beside the conversation: by number, or by the token of Phi-4."""


def conversation_of(example: Example, processor: Any) -> Conversation:
    """Return the conversation of an example, its own `audio` in it.

    The clip stands where the first user's text names it, else before that text. Items that hold sound are believed.
    """
    conversation: Conversation = example["conversation"]
    audio = example.get("audio")
    if audio is None or any(item["type"] == "audio" for item in iter_media(conversation)):
        return conversation
    item = {"type": "audio", "audio": audio}
    messages = [dict(message) for message in conversation]
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": [item]}, *messages]
    content = first["content"]
    items = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    token = getattr(processor, "audio_token", None)
    places = re.compile(f"{_AUDIO_PLACES.pattern}|{re.escape(token)}") if isinstance(token, str) else _AUDIO_PLACES
    for number, part in enumerate(items):
        match = places.search(part["text"]) if part.get("type") == "text" else None
        if match is not None:
            around = part["text"][: match.start()], part["text"][match.end() :]
            before, after = ([{"type": "text", "text": text}] if text else [] for text in around)
            items[number : number + 1] = [*before, item, *after]
            break
    else:
        items.insert(0, item)
    first["content"] = items
    return messages


def process_batch(
    examples: Sequence[Example],
    processor: Any,
    options: Mapping[str, Any] | None = None,
    *,
    steps: Steps | None = None,
    pixels: PixelForm = "full",
) -> dict[str, Any]:
    """Return the processor's batch with labels; rows are padded on the side on which the tokenizer pads.

    `options` are further arguments of the processor; `steps` say what the family does otherwise.
    """
    encoder = Encoder(processor, EncodeConfig(allow_unlabelled=True, pixels=pixels), steps)
    conversations = [encoder.shape(conversation_of(example, processor)) for example in examples]
    loaded = [load_media(conversation, {}, encoder.config, encoder.reads) for conversation in conversations]
    has_both = any(media.images for media in loaded) and any(media.videos for media in loaded)
    if type(processor).__name__ in SHARED_PIXELS and has_both:
        rows = [encoder.encode(conversation, {}) for conversation in conversations]
        return pad_rows(rows, pad_id=pad_id_of(processor), side=padding_side(processor)) | merge_media(rows)
    texts = [encoder.render(conversation) for conversation in conversations]
    batch = encoder.call([text.text for text, _ in texts], loaded, {"padding": True, **(options or {})})
    if any(markers is not None for _, markers in texts):
        # Control strings that a user typed are written as plain text, which changes lengths.
        spliced = [
            row if markers is None else encoder.splice(row, text, markers)
            for row, (text, markers) in zip(split_rows(batch), texts, strict=True)
        ]
        batch |= pad_rows(spliced, pad_id=pad_id_of(processor), side=padding_side(processor))
    if not (encoder.steps.writes_labels and "labels" in batch):
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        batch["labels"] = torch.full_like(ids, IGNORE)
        for row, (conversation, (text, _)) in enumerate(zip(conversations, texts, strict=True)):
            batch["labels"][row, mask[row]] = encoder.label(conversation, text, ids[row][mask[row]])
    return batch if encoder.steps.edit is None else encoder.steps.edit(batch, processor)


def encode_rows(examples: Sequence[Example], encoder: Encoder) -> list[dict[str, Any]]:
    """Encode one example at a time; the vision tokens of a fake image are hidden from attention."""
    rows = []
    for example in examples:
        row = encoder.encode(conversation_of(example, encoder.processor), {})
        if example.get(INJECTED_FAKE_KEY):
            row["attention_mask"] = mask_vision_tokens(encoder.processor, row["input_ids"], row["attention_mask"])
        rows.append(row)
    return rows


def mask_fake_images(batch: dict[str, Any], examples: Sequence[Example], processor: Any) -> dict[str, Any]:
    """Return the batch with the vision tokens of rows that carry a fake image hidden from attention."""
    faked = torch.tensor([bool(example.get(INJECTED_FAKE_KEY)) for example in examples])
    if not bool(faked.any()) or "attention_mask" not in batch:
        return batch
    hidden = mask_vision_tokens(processor, batch["input_ids"], batch["attention_mask"])
    return batch | {"attention_mask": torch.where(faked[:, None], hidden, batch["attention_mask"])}


def drop_overlong(examples: Sequence[Example], processor: Any, max_length: int) -> list[Example]:
    """Return the examples that are estimated to fit; a `ValueError` where none does."""
    kept = []
    for index, example in enumerate(examples):
        conversation = example["conversation"]
        try:
            text = render_template(processor, shape_content(conversation, chat_format(processor)))
            total = len(tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"])
            total += count_media_tokens(conversation, processor)
        except Exception as error:  # an estimate must not lose a sample
            logger.debug("Row %d could not be estimated and is kept: %r", index, error)
            total = 0
        if total > max_length:
            logger.warning("Dropped row %d of a batch: about %d tokens, more than %d.", index, total, max_length)
        else:
            kept.append(example)
    if not kept:
        raise ValueError(f"All {len(examples)} samples of the batch exceed max_length={max_length}.")
    return kept


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
    config = extract_image_config(processor)
    return sum(estimate_image_tokens(list(size), config) - 1 for size in sizes) if config is not None else 0
