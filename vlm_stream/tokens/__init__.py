"""Lengths without opening a tar: index columns and a processor's geometry enter, token counts leave.

    len(input_ids) = text_tokens + embeddings of all media - number of media

`text_tokens` (stored in the index, exact for the processor that counted it) is everything but embeddings, plus one for
each medium: the rendered chat, marks around media, timestamps, rows of crops. Embeddings follow from the sizes in the
index and a `Geometry`, so pixel limits may change without a recount; the tokenizer, the chat template, and, for
families that write about frames or crops, the frame rule may not (that of keyframes may:
`FrameText`). Imports numpy; must not import torch or transformers.

Files, in the order the data meets them:
    media.py        sizes of media, of one sample and as columns; keyframes in few numbers; which frames are sampled
    rules/          one class per kind of rule
    chat.py         how a processor is used: its tokenizer, its template, its arguments, its parts
    asker.py        asks a processor with blank media, for families without a rule
    measure.py      what it answered, kept
    geometry.py     `Geometry`: the rules of one processor, as a value; `check_media_sizes`, `count_tokens`
    families.py     processor -> geometry
    media_text.py   what families write around media
    text.py         exact text counts
"""

from vlm_stream.keys import FAKE_IMAGE_SIZE
from vlm_stream.tokens.asker import template_digest
from vlm_stream.tokens.chat import (
    METADATA_READERS,
    Processor,
    audio_rate,
    call_arguments,
    media_of,
    render_template,
    template_of,
    tokenizer_of,
)
from vlm_stream.tokens.families import read_family
from vlm_stream.tokens.geometry import (
    Geometry,
    Resized,
    TokenColumns,
    check_media_sizes,
    count_image_tokens,
    count_tokens,
    fake_image_tokens,
    repeats_one_token,
)
from vlm_stream.tokens.media import (
    AudioSize,
    FrameRule,
    ImageSize,
    MediaColumns,
    MediaSizes,
    VideoSize,
    as_objects,
    choose_keyframes,
    count_decoded,
    count_frames,
    count_keyframes,
    frame_indices,
    make_columns,
    make_video_metadata,
    pack_steps,
    unpack_steps,
)
from vlm_stream.tokens.rules.audio import resample_length
from vlm_stream.tokens.rules.grids import smart_resize_image, smart_resize_video
from vlm_stream.tokens.text import CHARACTERS_PER_TOKEN, FrameText, TextCounter, guess_text_tokens
