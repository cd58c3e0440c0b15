"""Qwen3-Omni: images, videos and sound; `input_features`, `feature_attention_mask`, `video_second_per_grid`.

`qwen_omni_utils` reads the media when it is installed, as the reference asks; without it our own media room does.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from vlm_stream.collate.examples import conversations_of, count_media, mask_fake_images
from vlm_stream.collate.process_batch import process_batch
from vlm_stream.collate.rows import shift
from vlm_stream.conversation import iter_media
from vlm_stream.encode import IGNORE, build_labels_from_template
from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.conversation import Conversation

__all__ = ["qwen3_omni_collate_fn"]


def qwen3_omni_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    use_audio_in_video: bool = False,
    pixels: Literal["full", "compact"] = "full",
) -> dict[str, Any]:
    """Collate conversations for Qwen3-Omni.

    Args:
        examples: `{"conversation": [...]}`.
        processor: The model's processor.
        use_audio_in_video: Interleave the sound track of each video with its frames; needs `qwen_omni_utils`.
        pixels: `compact` leaves pixels as bytes for `finish_pixels`; media are then read by our own media room.

    Returns:
        The processor's batch, padded on the right, with shifted labels and media counts per row.
    """
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
    if has_utils and _are_paths(conversations) and pixels == "full":
        batch = _with_utils(conversations, processor, use_audio_in_video)
    else:
        batch = process_batch(conversations, processor, {"padding_side": "right"}, pixels=pixels)
    return shift(mask_fake_images(batch, examples, processor)) | count_media(conversations)


def _are_paths(conversations: Sequence[Conversation]) -> bool:
    """Say whether all media are files or URLs, the only form that `qwen_omni_utils` samples videos of."""
    return all(isinstance(item[item["type"]], str) for chat in conversations for item in iter_media(chat))


def _with_utils(conversations: Sequence[Conversation], processor: Any, use_audio_in_video: bool) -> dict[str, Any]:
    process_mm_info = import_module("qwen_omni_utils").process_mm_info
    texts = [processor.apply_chat_template(c, add_generation_prompt=False, tokenize=False) for c in conversations]
    media: dict[str, list[Any]] = {"audio": [], "images": [], "videos": []}
    for conversation in conversations:
        parts = process_mm_info(conversation, use_audio_in_video=use_audio_in_video)
        for name, part in zip(media, parts, strict=True):
            media[name].append(part)
    given = {
        name: [e for e in parts if e] for name, parts in media.items() if any(e is not None and len(e) for e in parts)
    }
    flat_audio = {"audio": [wave for waves in given["audio"] for wave in waves]} if "audio" in given else {}
    batch: dict[str, Any] = dict(
        processor(
            text=texts,
            **{**given, **flat_audio},
            padding=True,
            padding_side="right",
            use_audio_in_video=use_audio_in_video,
            return_tensors="pt",
        )
    )
    labels = build_labels_from_template(batch["input_ids"], conversations, processor)
    batch["labels"] = labels.masked_fill(batch["attention_mask"] == 0, IGNORE)
    return batch
