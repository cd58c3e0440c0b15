"""Run a real processor on media of which only sizes are known; tests compare its lengths with counted ones."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.tokens.frames import frame_indices, make_video_metadata

if TYPE_CHECKING:
    from vlm_stream.conversation import Conversation, Item
    from vlm_stream.tokens.frames import FrameRule
    from vlm_stream.tokens.sizes import VideoSize

__all__ = ["encode_pixels"]


def encode_pixels(processor: Any, conversation: Conversation, rule: FrameRule) -> dict[str, Any]:
    """Run a processor on a conversation whose images are pixels, whose sounds are waves, and whose clips are sizes.

    Clips become black frames, those that the rule picks; the processor is told their times and samples nothing itself.
    """
    metadata: list[dict[str, Any]] = []
    messages = [
        {**message, "content": [_decode_clip(item, rule, metadata) for item in message["content"]]}
        for message in conversation
    ]
    options: dict[str, Any] = {}
    if metadata:
        options = {"do_sample_frames": False, "video_metadata": metadata}
        if type(processor).__name__.startswith("NemotronH_Omni"):  # reads the metadata of its only clip, as an object
            video_utils = import_module(f"{type(processor).__module__.split('.')[0]}.video_utils")
            options["video_metadata"] = video_utils.VideoMetadata(**metadata[0])
    call = processor.apply_chat_template
    if "processor_kwargs" in signature(call).parameters:  # since 5.0; before, options stand beside the others
        options = {"processor_kwargs": options}
    if processor.chat_template is None:  # Phi-4's class loses it on loading
        options["chat_template"] = processor.tokenizer.chat_template
    return dict(call([messages], tokenize=True, return_dict=True, return_tensors="pt", **options))


def _decode_clip(item: Item, rule: FrameRule, metadata: list[dict[str, Any]]) -> Item:
    """Return a clip's item with frames instead of its size, and note what the processor is to be told of it."""
    if item["type"] != "video":
        return item
    size: VideoSize = item["video"]
    indices = frame_indices(size.frames, size.fps, rule, size.picked or None)
    metadata.append(make_video_metadata(size.frames, size.fps, size.seconds, indices))
    return {"type": "video", "video": np.zeros((len(indices), size.height, size.width, 3), np.uint8)}
