"""Nemotron-Omni: images, one video and sound per sample; the processor takes one sample at a time.

Leaves the tensors of the class inside transformers under its own names; the published remote class calls sound
`sound_features` and wants `image_flags`, so its batches get those.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.collate.examples import conversations_of
from vlm_stream.collate.join_media import join_media
from vlm_stream.collate.rows import cut_rows, pad_id_of, pad_rows, pad_to, shift
from vlm_stream.conversation import iter_media
from vlm_stream.encode import EncodeConfig, Encoder, frame_rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["nemotron_omni_collate_fn"]

_REMOTE: Final = "NemotronH_Nano_Omni_Reasoning_V3Processor"
_REMOTE_NAMES: Final = {"input_features": "sound_features", "input_features_mask": "sound_attention_mask"}


def nemotron_omni_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None, max_video_frames: int = 8
) -> dict[str, Any]:
    """Collate conversations for Nemotron-Omni.

    Args:
        examples: `{"conversation": [...]}`; sound as an array, (array, rate), bytes or a path.
        processor: The model's processor.
        max_length: Length of every batch before the shift; longer rows are cut, never through media.
        max_video_frames: Most frames of a video; the number is always even.

    Returns:
        The padded batch with shifted labels and joined media, pixels in bfloat16.

    Raises:
        NotImplementedError: When a sample has more than one video.
    """
    for conversation in conversations_of(examples):
        if sum(item["type"] == "video" for item in iter_media(conversation)) > 1:
            raise NotImplementedError("Nemotron-Omni takes one video per sample.")
    rule = replace(frame_rule(processor, None), max_frames=max_video_frames, temporal_patch_size=2)
    rule = replace(rule, min_frames=min(rule.min_frames, max_video_frames))
    encoder = Encoder(processor, EncodeConfig(frames=rule, allow_unlabelled=True))
    rows = [encoder.encode(conversation, {}) for conversation in conversations_of(examples)]
    batch: dict[str, Any] = dict(pad_rows(rows, pad_id=pad_id_of(processor)))
    if max_length is not None:
        batch = pad_to(cut_rows(batch, max_length, processor), max_length, pad_id_of(processor))
    batch = shift(batch) | join_media(rows, pixel_dtype=torch.bfloat16)
    return _remote_names(batch) if type(processor).__name__ == _REMOTE else batch


def _remote_names(batch: dict[str, Any]) -> dict[str, Any]:
    renamed = {_REMOTE_NAMES.get(key, key): value for key, value in batch.items()}
    if "pixel_values" in renamed:
        renamed["image_flags"] = torch.ones((len(renamed["pixel_values"]), 1), dtype=torch.int64)
    return renamed
