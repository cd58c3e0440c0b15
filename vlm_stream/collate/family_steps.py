"""The steps that single families need: how their processors are called, and what their models want in a batch.

Enters: examples, rows or batches of one family. Leaves: the same, in the form that `families.py` goes on with. Nothing
is shifted here.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.collate.conversations import conversations_of, label_rows, prepare, process_batch
from vlm_stream.collate.media import counts_of
from vlm_stream.collate.rows import cut_to
from vlm_stream.collate.token_edits import expand_image_tokens, kimi_media_id
from vlm_stream.conversation import iter_media
from vlm_stream.encode import (
    EncodeConfig,
    Encoder,
    audio_rate_of,
    build_labels,
    build_labels_from_template,
    call_processor,
    frame_rule,
    mask_vision_tokens,
    message_text,
)
from vlm_stream.errors import ConfigError
from vlm_stream.keys import IGNORE, INJECTED_FAKE_KEY
from vlm_stream.media import decode_image, resample_audio, to_rgb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.collate.conversations import Example, PixelForm
    from vlm_stream.conversation import Conversation


def add_num_patches(batch: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Add the image tokens per row, which models with 5-D pixels (tiles) are cut by."""
    token_id = getattr(processor, "image_token_id", None)
    pixels = batch.get("pixel_values")
    if token_id is None or not isinstance(pixels, torch.Tensor) or pixels.ndim != 5:
        return batch
    return batch | {"num_patches": (batch["input_ids"] == token_id).sum(dim=1)}


# Qwen3-Omni ----------------------------------------------------------------------------------------------------------


def process_omni(
    examples: Sequence[Example], processor: Any, use_audio_in_video: bool = False, pixels: PixelForm = "full"
) -> dict[str, Any]:
    """Read media with `qwen_omni_utils` where it is installed, as NeMo Automodel does, else with our own reader."""
    conversations = conversations_of(examples)
    has_utils = find_spec("qwen_omni_utils") is not None
    if use_audio_in_video and not has_utils:
        raise ConfigError(
            "use_audio_in_video needs the sound tracks of the videos, which the package 'qwen_omni_utils' reads and "
            "which is not installed. Install it with: pip install qwen-omni-utils, or leave use_audio_in_video off."
        )
    if use_audio_in_video and pixels == "compact":
        raise ConfigError(
            "use_audio_in_video goes through 'qwen_omni_utils', which gives full pixels, so compact ones cannot be had "
            "with it; leave one of the two off."
        )
    # Files and URLs are the only form that qwen_omni_utils samples videos of.
    are_paths = all(isinstance(item[item["type"]], str) for chat in conversations for item in iter_media(chat))
    if has_utils and are_paths and pixels == "full":
        return _process_with_utils(conversations, processor, use_audio_in_video)
    return process_batch(examples, processor, {"padding_side": "right"}, pixels=pixels)


def _process_with_utils(
    conversations: Sequence[Conversation], processor: Any, use_audio_in_video: bool
) -> dict[str, Any]:
    process_mm_info = import_module("qwen_omni_utils").process_mm_info
    texts = [processor.apply_chat_template(c, add_generation_prompt=False, tokenize=False) for c in conversations]
    infos = [process_mm_info(conversation, use_audio_in_video=use_audio_in_video) for conversation in conversations]
    audios, images, videos = ([part for part in parts if part] for parts in zip(*infos, strict=True))
    media = {"audio": [wave for waves in audios for wave in waves], "images": images, "videos": videos}
    batch: dict[str, Any] = dict(
        processor(
            text=texts,
            **{name: items for name, items in media.items() if items},
            padding=True,
            padding_side="right",
            use_audio_in_video=use_audio_in_video,
            return_tensors="pt",
        )
    )
    labels = build_labels_from_template(batch["input_ids"], conversations, processor)
    return batch | {"labels": labels.masked_fill(batch["attention_mask"] == 0, IGNORE)}


# Kimi-K2.5 -----------------------------------------------------------------------------------------------------------


def takes_medias(processor: Any) -> bool:
    """Say whether this is the published remote code, which leaves one placeholder per image, not transformers' class.

    Its placeholders are expanded here, so that no pipeline stage changes the length of a sequence.
    """
    return "medias" in inspect.signature(type(processor).__call__).parameters


def encode_kimi_row(example: Example, processor: Any) -> dict[str, Any]:
    """Encode one example with the remote processor; labels follow the expanded placeholders."""
    encoder = Encoder(processor, EncodeConfig())
    prepared = prepare(encoder, example["conversation"])
    medias = [{"type": "image", "image": image} for image in prepared.loaded.images]
    out = processor(text=prepared.rendered.text, return_tensors="pt", **({"medias": medias} if medias else {}))
    row: dict[str, Any] = {"input_ids": out["input_ids"][0], "attention_mask": out["attention_mask"][0]}
    if prepared.markers is not None:
        row |= encoder.splice(row, prepared.rendered, prepared.markers)
    media = {key: out[key] for key in ("pixel_values", "grid_thws") if out.get(key) is not None}
    ids, mask = row["input_ids"], row["attention_mask"]
    if "grid_thws" in media:
        ids, mask = expand_image_tokens(ids, mask, media["grid_thws"], kimi_media_id(processor))
    labels = encoder.label(prepared.conversation, prepared.rendered, ids)
    if example.get(INJECTED_FAKE_KEY):
        mask = mask_vision_tokens(processor, ids, mask)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **media}


def add_kimi_grids(batch: dict[str, Any], processor: Any) -> dict[str, Any]:  # noqa: ARG001 - a family's finish
    """Name the grids as both of the family's models do: `grid_thws` `[N, 3]` and `image_grid_hws` `[N, 2]`."""
    grids = batch.get("grid_thws", batch.get("image_grid_thw"))
    return batch if grids is None else batch | {"grid_thws": grids, "image_grid_hws": grids[:, 1:]}


# Nemotron-Omni -------------------------------------------------------------------------------------------------------

_REMOTE_OMNI: Final = "NemotronH_Nano_Omni_Reasoning_V3Processor"
_REMOTE_OMNI_NAMES: Final = {"input_features": "sound_features", "input_features_mask": "sound_attention_mask"}


def encode_omni_rows(examples: Sequence[Example], processor: Any, max_video_frames: int) -> list[dict[str, Any]]:
    """Encode one example at a time, as the processor takes them; the number of video frames is always even."""
    for conversation in conversations_of(examples):
        if sum(item["type"] == "video" for item in iter_media(conversation)) > 1:
            raise NotImplementedError("Nemotron-Omni takes one video per sample.")
    rule = frame_rule(processor, None)
    least = min(rule.min_frames, max_video_frames)
    rule = replace(rule, max_frames=max_video_frames, temporal_patch_size=2, min_frames=least)
    encoder = Encoder(processor, EncodeConfig(frames=rule, allow_unlabelled=True))
    return [encoder.encode(conversation, {}) for conversation in conversations_of(examples)]


def name_omni_tensors(batch: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Rename sound and add `image_flags` for the published remote class; transformers' class keeps its names."""
    if type(processor).__name__ != _REMOTE_OMNI:
        return batch
    renamed = {_REMOTE_OMNI_NAMES.get(key, key): value for key, value in batch.items()}
    if "pixel_values" in renamed:
        renamed["image_flags"] = torch.ones((len(renamed["pixel_values"]), 1), dtype=torch.int64)
    return renamed


# Nemotron-Parse ------------------------------------------------------------------------------------------------------

TASK_PROMPT: Final = "</s><s><predict_bbox><predict_classes><output_markdown>"


def process_pages(examples: Sequence[Example], processor: Any, task_prompt: str = TASK_PROMPT) -> dict[str, Any]:
    """Join the fixed prompt and the answer of each page: the processor has no chat template."""
    _decoder_padding(processor.tokenizer)
    pages = [_page(example["conversation"]) for example in examples]
    images = [image for image, _ in pages]
    texts = [task_prompt + answer for _, answer in pages]
    batch: dict[str, Any] = dict(processor(images=images, text=texts, padding=True, return_tensors="pt"))
    # The prompt goes first, so that an answer is never found inside it.
    turns = [
        [{"role": "user", "content": task_prompt}, {"role": "assistant", "content": answer}] for _, answer in pages
    ]
    batch["labels"] = build_labels(batch["input_ids"], turns, processor)
    return batch | counts_of([int(image is not None) for image in images], [])


def add_decoder_inputs(batch: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Add what the decoder of an encoder-decoder reads; the prompt itself begins with its start token."""
    ids = batch["input_ids"].clone()
    mask = (ids != _decoder_padding(processor.tokenizer)).long()
    return batch | {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def _page(conversation: Conversation) -> tuple[Any, str]:
    """Return the image of the last user turn that has one before the answer, and the first answer with text."""
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
    has_start = any(getattr(tokenizer, name, None) is not None for name in names)
    pad = getattr(tokenizer, "pad_token_id", None)
    if not has_start or pad is None:
        raise ValueError(
            "The decoder needs a start token and a padding token, and the tokenizer names "
            f"{'no padding token' if has_start else 'no start token'}. Set it on the tokenizer."
        )
    return int(pad)


# Phi-4-multimodal ----------------------------------------------------------------------------------------------------

_PHI4_MAX_LENGTH: Final = 1024
_PHI4_IMAGES: Final = ("input_image_embeds", "image_pixel_values")
_PHI4_AUDIOS: Final = ("input_audio_embeds", "audio_input_features")
_PHI4_IMAGE_KEYS: Final = (*_PHI4_IMAGES, "image_sizes", "image_attention_mask")


def process_phi4(examples: Sequence[Example], processor: Any) -> dict[str, Any]:
    """Put an example's own `audio` into its conversation.

    The published remote code and transformers' class name their tensors differently; either's names stay.
    """
    encoder = Encoder(processor, EncodeConfig())
    prepared = [prepare(encoder, _with_audio(example, processor)) for example in examples]
    texts = [p.rendered.text for p in prepared]
    if "audios" in inspect.signature(type(processor).__call__).parameters:
        media: dict[str, Any] = {
            "images": [image for p in prepared for image in p.loaded.images],
            "audios": [(audio, audio_rate_of(processor)) for p in prepared for audio in p.loaded.audios],
        }
        given = {name: items for name, items in media.items() if items}
        batch = dict(processor(text=texts, padding=True, return_tensors="pt", **given))
    else:
        batch = call_processor(processor, texts, [p.loaded for p in prepared], {"padding": True})
    batch["labels"] = label_rows(encoder, batch, prepared)
    batch = cut_to(batch, _PHI4_MAX_LENGTH, processor)
    if not any(p.loaded.images for p in prepared):
        batch = {key: value for key, value in batch.items() if key not in _PHI4_IMAGE_KEYS}
    return batch


def _with_audio(example: Example, processor: Any) -> Conversation:
    """Return the conversation with the example's own sound in it, unless its items place it already."""
    conversation: Conversation = example["conversation"]
    audio = example.get("audio")
    if audio is None or any(item["type"] == "audio" for item in iter_media(conversation)):
        return conversation
    if isinstance(audio, dict):
        audio = (audio["array"], audio["sampling_rate"])
    if isinstance(audio, (tuple, list)) and len(audio) == 2:
        audio = resample_audio(audio[0], int(audio[1]), audio_rate_of(processor))
    messages = [dict(message) for message in conversation]
    first = next(message for message in messages if message["role"] == "user")
    content = first["content"]
    items = [{"type": "text", "text": content}] if isinstance(content, str) else content
    first["content"] = [{"type": "audio", "audio": audio}, *items]
    return messages


def add_input_mode(batch: dict[str, Any], processor: Any) -> dict[str, Any]:  # noqa: ARG001 - a family's finish
    """Say which adapters the model switches on: 0 none, 1 image, 2 sound, 3 both; the processor may have said it."""
    if len(batch.get("input_mode", ())) == 1:
        return batch
    has_image, has_audio = (_has_any(batch, keys) for keys in (_PHI4_IMAGES, _PHI4_AUDIOS))
    return batch | {"input_mode": torch.tensor([1 * has_image + 2 * has_audio])}


def _has_any(batch: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return any(batch.get(key) is not None and len(batch[key]) > 0 for key in keys)
