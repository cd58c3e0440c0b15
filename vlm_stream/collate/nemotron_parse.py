"""Nemotron-Parse: one page image, an encoder-decoder; the processor has no chat template, prompt and answer are joined.

The prompt is fixed text; the answer after it is what is learned, up to and with the end token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.collate.default import as_bfloat16
from vlm_stream.collate.rows import shift
from vlm_stream.encode import build_labels, message_text
from vlm_stream.media import decode_image, to_rgb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.conversation import Conversation

__all__ = ["nemotron_parse_collate_fn"]

_TASK_PROMPT: Final = "</s><s><predict_bbox><predict_classes><output_markdown>"


def nemotron_parse_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, task_prompt: str = _TASK_PROMPT
) -> dict[str, Any]:
    """Collate pages and their transcriptions for Nemotron-Parse.

    Args:
        examples: `{"conversation": [...]}`: the image of the last user turn that has one before the answer, and the
            first answer with text.
        processor: The model's processor, called with images and text.
        task_prompt: What the decoder is asked.

    Returns:
        The processor's batch with shifted labels, pixels in bfloat16, `decoder_input_ids`, `decoder_attention_mask` and
        `n_images_per_sample` if any row has an image.

    Raises:
        ValueError: When the tokenizer has no start token or no padding token for the decoder.
    """
    pad = _decoder_padding(processor.tokenizer)
    pages = [_page(example["conversation"]) for example in examples]
    images = [image for image, _ in pages]
    texts = [task_prompt + answer for _, answer in pages]
    batch: dict[str, Any] = dict(processor(images=images, text=texts, padding=True, return_tensors="pt"))
    # The prompt goes first, so that an answer is never found inside it.
    turns = [
        [{"role": "user", "content": task_prompt}, {"role": "assistant", "content": answer}] for _, answer in pages
    ]
    batch["labels"] = build_labels(batch["input_ids"], turns, processor)
    batch = shift(as_bfloat16(batch))
    decoder_ids = batch["input_ids"].clone()  # the prompt itself begins with the decoder's start token
    batch |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": (decoder_ids != pad).long()}
    if any(image is not None for image in images):
        batch["n_images_per_sample"] = torch.tensor([int(image is not None) for image in images], dtype=torch.int64)
    return batch


def _page(conversation: Conversation) -> tuple[Any, str]:
    """Return the image and the answer."""
    image, answer = None, ""
    for message in conversation:
        content = message.get("content")
        if message["role"] == "user" and isinstance(content, list):
            image = next((item["image"] for item in content if item.get("type") == "image"), image)
        elif message["role"] == "assistant" and not answer:
            answer = message_text(message)
        if image is not None and answer:
            break
    if image is None:
        return None, answer
    return (to_rgb(image) if hasattr(image, "convert") else decode_image(image)), answer


def _decoder_padding(tokenizer: Any) -> int:
    """Return the padding token, after making sure that the decoder has a start token too."""
    names = ("decoder_start_token_id", "bos_token_id", "eos_token_id")
    start = next((value for value in (getattr(tokenizer, name, None) for name in names) if value is not None), None)
    pad = getattr(tokenizer, "pad_token_id", None)
    if start is None or pad is None:
        raise ValueError(
            "The decoder needs a start token and a padding token, and the tokenizer names "
            f"{'no padding token' if start is not None else 'no start token'}. Set it on the tokenizer."
        )
    return int(pad)
