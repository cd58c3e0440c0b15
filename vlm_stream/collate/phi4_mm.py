"""Phi-4-multimodal: sound beside the conversation (`audio` of the example) or inside it; images too.

The published remote code and the class inside transformers name their tensors differently (`input_audio_embeds` and
`audio_input_features`); either's names leave as they came. `input_mode` says which adapters the model switches on.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.collate.examples import conversations_of
from vlm_stream.collate.process_batch import Prepared, label_rows, prepare
from vlm_stream.collate.rows import cut_rows, shift
from vlm_stream.conversation import iter_media
from vlm_stream.encode import EncodeConfig, Encoder, audio_rate_of, call_processor
from vlm_stream.media import resample_audio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.conversation import Conversation

__all__ = ["phi4_mm_collate_fn"]

_MAX_LENGTH: Final = 1024
_IMAGE_KEYS: Final = ("input_image_embeds", "image_pixel_values", "image_sizes", "image_attention_mask")
_AUDIO_KEYS: Final = ("input_audio_embeds", "audio_input_features")


def phi4_mm_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
    """Collate conversations with sound for Phi-4-multimodal.

    Args:
        examples: `{"conversation": [...], "audio": ...}`; sound as an array, (array, rate), or a dict with `array` and
            `sampling_rate`.
        processor: The model's processor.

    Returns:
        The processor's batch, at most 1024 tokens before the shift, `input_mode` (0 text, 1 image, 2 sound, 3 both)
        and shifted labels. Image tensors are left out of batches without images.
    """
    encoder = Encoder(processor, EncodeConfig())
    conversations = [_with_audio(example, processor) for example in examples]
    prepared = [prepare(encoder, conversation) for conversation in conversations]
    batch = _call(processor, prepared)
    batch["labels"] = label_rows(encoder, batch, prepared)
    batch = cut_rows(batch, _MAX_LENGTH, processor)
    if "input_mode" not in batch:
        batch["input_mode"] = torch.tensor([_input_mode(batch)])
    if not any(item["type"] == "image" for chat in conversations_of(examples) for item in iter_media(chat)):
        batch = {key: value for key, value in batch.items() if key not in _IMAGE_KEYS}
    return shift(batch)


def _with_audio(example: Mapping[str, Any], processor: Any) -> Conversation:
    """Return the conversation with the example's own sound in it, unless its text or items place it already."""
    conversation: Conversation = example["conversation"]
    if example.get("audio") is None or any(item["type"] == "audio" for item in iter_media(conversation)):
        return conversation
    audio = _as_waveform(example["audio"], audio_rate_of(processor))
    messages = [dict(message) for message in conversation]
    first = next(message for message in messages if message["role"] == "user")
    content = first["content"]
    items = [{"type": "text", "text": content}] if isinstance(content, str) else content
    first["content"] = [{"type": "audio", "audio": audio}, *items]
    return messages


def _as_waveform(audio: Any, rate: int) -> Any:
    if isinstance(audio, dict):
        audio = (audio["array"], audio["sampling_rate"])
    if isinstance(audio, (tuple, list)) and len(audio) == 2:
        return resample_audio(audio[0], int(audio[1]), rate)
    return audio


def _call(processor: Any, prepared: Sequence[Prepared]) -> dict[str, Any]:
    texts = [p.rendered.text for p in prepared]
    if "audios" not in inspect.signature(type(processor).__call__).parameters:
        return call_processor(processor, texts, [p.loaded for p in prepared], {"padding": True})
    media: dict[str, Any] = {
        "images": [image for p in prepared for image in p.loaded.images],
        "audios": [(audio, audio_rate_of(processor)) for p in prepared for audio in p.loaded.audios],
    }
    given = {name: items for name, items in media.items() if items}
    return dict(processor(text=texts, padding=True, return_tensors="pt", **given))


def _input_mode(batch: Mapping[str, Any]) -> int:
    """Return 3 for image and sound, 1 for images, 2 for sound, 0 for neither."""
    has_image = any(_is_filled(batch.get(key)) for key in ("input_image_embeds", "image_pixel_values"))
    has_audio = any(_is_filled(batch.get(key)) for key in _AUDIO_KEYS)
    return {(True, True): 3, (True, False): 1, (False, True): 2, (False, False): 0}[has_image, has_audio]


def _is_filled(value: Any) -> bool:
    return value is not None and len(value) > 0
