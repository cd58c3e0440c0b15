"""Lengths without opening a tar: index columns and a processor's geometry enter, token counts leave.

    len(input_ids) = text_tokens + embeddings of all media - number of media

`text_tokens` (stored in the index, exact for the processor that counted it) is everything but embeddings, plus one for
each medium: the rendered chat, marks around media, timestamps, rows of crops. Embeddings follow from the sizes in the
index and a `Geometry`, so pixel limits may change without a recount; the tokenizer, the chat template, and, for
families that write about frames or crops, the frame rule may not. Imports numpy; must not import torch or transformers.

Files, in the order the data meets them:
    media.py        sizes of media, of one sample and as columns; which frames are sampled; `check_media_sizes`
    rules/          one class per kind of rule
    asker.py        asks a processor with blank media, for families without a rule
    measure.py      what it answered, kept
    geometry.py     `Geometry`: the rules of one processor, as a value; `count_tokens`, `fake_image_tokens`
    families.py     processor -> geometry
    media_text.py   what families write around media
    text.py         exact text counts
"""

from vlm_stream.keys import FAKE_IMAGE_SIZE
from vlm_stream.tokens.asker import template_digest
from vlm_stream.tokens.families import Processor, read_family
from vlm_stream.tokens.geometry import Geometry, TokenColumns, count_tokens, fake_image_tokens
from vlm_stream.tokens.media import (
    AudioSize,
    FrameRule,
    ImageSize,
    MediaColumns,
    MediaSizes,
    VideoSize,
    check_media_sizes,
    count_frames,
    frame_indices,
    join_columns,
    make_columns,
    make_video_metadata,
)
from vlm_stream.tokens.rules.grids import smart_resize_image, smart_resize_video
from vlm_stream.tokens.text import CHARACTERS_PER_TOKEN, TextCounter, guess_text_tokens

__all__ = [
    "CHARACTERS_PER_TOKEN",
    "FAKE_IMAGE_SIZE",
    "AudioSize",
    "FrameRule",
    "Geometry",
    "ImageSize",
    "MediaColumns",
    "MediaSizes",
    "Processor",
    "TextCounter",
    "TokenColumns",
    "VideoSize",
    "check_media_sizes",
    "count_frames",
    "count_tokens",
    "fake_image_tokens",
    "frame_indices",
    "guess_text_tokens",
    "join_columns",
    "make_columns",
    "make_video_metadata",
    "read_family",
    "smart_resize_image",
    "smart_resize_video",
    "template_digest",
]
