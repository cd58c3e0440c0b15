"""Encode: one conversation and its media become the tensors of one sample.

Enters: a conversation whose media items name members, the members' bytes, a transformers processor. Leaves: ids, mask,
labels (not shifted), media tensors; or a `BadSampleError`. Must not be known here: other samples, padding, packing,
shards, and where the bytes came from.

Files, in the order the data meets them:
    encoder.py         `EncodeConfig`, `Encoder`: the steps of one sample; `Steps`: those that a family replaces
    load_media.py      bytes to images, frames, waves; the fake image
    sizes_only.py      grids from sizes, no pixels
    chat_format.py     what a chat template writes around turns
    control_tokens.py  tokens of media; typed control strings stay text
    call_processor.py  the call of the processor
    labels.py          labels from the rendered text
    label_search.py    labels from ids alone
"""

from __future__ import annotations

from vlm_stream.encode.call_processor import SHARED_PIXELS, call_processor
from vlm_stream.encode.chat_format import ChatFormat, Rendered, chat_format, render_template, template_of
from vlm_stream.encode.control_tokens import (
    TypedMarkers,
    check_media_tokens,
    media_token_ids,
    tokenizer_of,
    vision_token_ids,
)
from vlm_stream.encode.encoder import EncodeConfig, Encoder, Steps, fit_length, shape_content
from vlm_stream.encode.label_search import build_labels, build_labels_from_template, message_text
from vlm_stream.encode.load_media import (
    LoadedMedia,
    audio_rate_of,
    frame_rule,
    has_media,
    inject_fake_image,
    load_media,
    make_fake_image,
    mask_vision_tokens,
    processor_reads,
)
from vlm_stream.keys import IGNORE

__all__ = [
    "IGNORE",
    "SHARED_PIXELS",
    "ChatFormat",
    "EncodeConfig",
    "Encoder",
    "LoadedMedia",
    "Rendered",
    "Steps",
    "TypedMarkers",
    "audio_rate_of",
    "build_labels",
    "build_labels_from_template",
    "call_processor",
    "chat_format",
    "check_media_tokens",
    "fit_length",
    "frame_rule",
    "has_media",
    "inject_fake_image",
    "load_media",
    "make_fake_image",
    "mask_vision_tokens",
    "media_token_ids",
    "message_text",
    "processor_reads",
    "render_template",
    "shape_content",
    "template_of",
    "tokenizer_of",
    "vision_token_ids",
]
