"""Lengths without opening a tar: index columns and a processor's geometry enter, token counts leave.

    len(input_ids) = text_tokens + embeddings of all media - number of media

`text_tokens` (stored in the index, exact for the processor that counted it) is everything but embeddings, plus one for
each medium: the rendered chat, marks around media, timestamps, rows of crops. Embeddings follow from the sizes in the
index and a `Geometry`, so pixel limits may change without a recount; the tokenizer, the chat template, and, for
families that write about frames or crops, the frame rule may not. Imports numpy; must not import torch or transformers.

Files, in the order the data meets them:
    sizes.py        sizes of media, of one sample and as columns; `check_media_sizes`
    frames.py       which frames of a video are sampled
    rules/          one class per kind of rule
    geometry.py     `Geometry`: the rules of one processor, as a value
    families.py     processor -> geometry
    count.py        `count_tokens`, `fake_image_tokens`
    media_text.py   what families write around media
    text.py         exact text counts
    probe.py        a real processor run on sizes, for tests
"""

from vlm_stream.keys import FAKE_IMAGE_SIZE
from vlm_stream.tokens.count import TokenColumns, count_tokens, counted_as, fake_image_tokens
from vlm_stream.tokens.families import Processor, read_family
from vlm_stream.tokens.frames import FrameRule, count_frames, frame_indices, make_video_metadata
from vlm_stream.tokens.geometry import Geometry
from vlm_stream.tokens.probe import encode_pixels
from vlm_stream.tokens.rules.base import GUESSED_TOKENS
from vlm_stream.tokens.rules.grids import smart_resize_image, smart_resize_video
from vlm_stream.tokens.sizes import (
    AudioSize,
    ImageSize,
    MediaColumns,
    MediaSizes,
    VideoSize,
    check_media_sizes,
    join_columns,
    make_columns,
)
from vlm_stream.tokens.text import CHARACTERS_PER_TOKEN, TextCounter, count_text_tokens, guess_text_tokens

__all__ = [
    "CHARACTERS_PER_TOKEN",
    "FAKE_IMAGE_SIZE",
    "GUESSED_TOKENS",
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
    "count_text_tokens",
    "count_tokens",
    "counted_as",
    "encode_pixels",
    "fake_image_tokens",
    "frame_indices",
    "guess_text_tokens",
    "join_columns",
    "make_columns",
    "make_video_metadata",
    "read_family",
    "smart_resize_image",
    "smart_resize_video",
]
