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
    kept_text.py       ids and labels that conversion has made already
"""

from vlm_stream.encode.call_processor import SHARED_PIXELS, call_processor
from vlm_stream.encode.chat_format import ChatFormat, Rendered, chat_format
from vlm_stream.encode.control_tokens import (
    TypedMarkers,
    check_media_tokens,
    media_token_ids,
    vision_token_ids,
)
from vlm_stream.encode.encoder import EncodeConfig, Encoder, Steps, fit_length, shape_content
from vlm_stream.encode.kept_text import KeptText, kept_text_key, pack_text, text_from_bytes, text_to_bytes, unpack_text
from vlm_stream.encode.label_search import build_labels, build_labels_from_template, message_text
from vlm_stream.encode.load_media import (
    LoadedMedia,
    frame_rule,
    has_media,
    inject_fake_image,
    load_media,
    make_fake_image,
    mask_vision_tokens,
    name_frames,
    picker,
    processor_reads,
)
from vlm_stream.keys import IGNORE
from vlm_stream.tokens import render_template, template_of, tokenizer_of
