"""Encode: one conversation and its media become the tensors of one sample.

Enters: a conversation whose media items name members, the members' bytes, a transformers processor. Leaves: ids, mask,
labels (not shifted), media tensors; or a `BadSampleError`. Must not be known here: other samples, padding, packing,
shards, and where the bytes came from.

Files, in the order the data meets them: `config.py`, `compact.py`, `fake_image.py`, `load_media.py` (with
`pick_frames.py`), `chat_format.py`, `typed_markers.py`, `blind_processor.py` (sizes instead of media), `encoder.py`,
`labels.py`, `fit_length.py`, `media_tokens.py`; `marker_scan.py` and `text_search.py` label ids for callers that have
no rendered text.
"""

from __future__ import annotations

from vlm_stream.encode.chat_format import ChatFormat, chat_format
from vlm_stream.encode.config import EncodeConfig
from vlm_stream.encode.encoder import Encoder
from vlm_stream.encode.fake_image import inject_fake_image, make_fake_image, mask_vision_tokens
from vlm_stream.encode.labels import IGNORE
from vlm_stream.encode.marker_scan import build_labels_from_template
from vlm_stream.encode.media_tokens import check_media_tokens, vision_token_ids
from vlm_stream.encode.text_search import build_labels

__all__ = [
    "IGNORE",
    "ChatFormat",
    "EncodeConfig",
    "Encoder",
    "build_labels",
    "build_labels_from_template",
    "chat_format",
    "check_media_tokens",
    "inject_fake_image",
    "make_fake_image",
    "mask_vision_tokens",
    "vision_token_ids",
]
