"""Lengths without opening a tar: index columns and a processor's geometry enter, token counts leave.

    len(input_ids) = text_tokens + embeddings of all media - number of media

`text_tokens` (stored in the index, exact for the processor that counted it) is everything but embeddings, plus one for
each medium: the rendered chat, marks around media, timestamps, rows of crops. Embeddings follow from the sizes in the
index and a `Geometry`, so pixel limits may change without a recount; the tokenizer, the chat template, and, for
families that write about frames or crops, the frame rule may not. Imports numpy; must not import torch or transformers.

Files, in the order the data meets them:
    columns.py      what an index says, what counting makes of it
    sizes.py        the media of one sample; `check_media_sizes`
    frames.py       THE rule by which frames are sampled
    resize.py       resize rules of the Qwen kind
    rules/          one class per kind of rule
    geometry.py     `Geometry`: the rules of one processor, as a value
    processor_parts.py, families.py   processor -> geometry
    count.py        `count_tokens`, `fake_image_tokens`
    media_text.py   what families write around media
    text.py         exact text counts
    probe.py        `probe_geometry`: the real processor confirms the counts, or they are called estimates
    estimate.py     estimates from `mm_inputs_meta`, for in-memory samples
"""

from vlm_stream.tokens.columns import MediaColumns, TokenColumns, join_columns
from vlm_stream.tokens.count import FAKE_IMAGE_SIZE, count_tokens, counted_as, fake_image_tokens
from vlm_stream.tokens.estimate import (
    estimate_image_tokens,
    estimate_sample_length,
    estimate_video_tokens,
    extract_image_config,
    extract_video_config,
)
from vlm_stream.tokens.frames import FrameRule, count_frames, frame_indices, make_video_metadata
from vlm_stream.tokens.geometry import Geometry
from vlm_stream.tokens.probe import probe_geometry
from vlm_stream.tokens.resize import smart_resize_image, smart_resize_video
from vlm_stream.tokens.sizes import AudioSize, ImageSize, MediaSizes, VideoSize, check_media_sizes, make_columns
from vlm_stream.tokens.text import TextCounter, count_text_tokens, guess_text_tokens

__all__ = [
    "FAKE_IMAGE_SIZE",
    "AudioSize",
    "FrameRule",
    "Geometry",
    "ImageSize",
    "MediaColumns",
    "MediaSizes",
    "TextCounter",
    "TokenColumns",
    "VideoSize",
    "check_media_sizes",
    "count_frames",
    "count_text_tokens",
    "count_tokens",
    "counted_as",
    "estimate_image_tokens",
    "estimate_sample_length",
    "estimate_video_tokens",
    "extract_image_config",
    "extract_video_config",
    "fake_image_tokens",
    "frame_indices",
    "guess_text_tokens",
    "join_columns",
    "make_columns",
    "make_video_metadata",
    "probe_geometry",
    "smart_resize_image",
    "smart_resize_video",
]
