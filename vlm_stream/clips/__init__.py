"""Clips: where the pictures of a video file lie, so that a few of them can be fetched and decoded without the rest.

Enters: the bytes of a file, once, at conversion; later the few byte ranges that hold the wanted frames. Leaves: a
table of the file's packets; the ranges that some frames need; those frames. Must not be known here: tars, stores, and
which frames a model wants.

Files, in the order the data meets them: `table` (the value and its bytes), `parse` (a file -> its table), `sample` (the
tables of one sample), `cut` (wanted frames -> runs of packets and byte ranges), `packets` (runs -> pictures).
"""

from vlm_stream.clips.cut import ClipCut, ClipRun, cut_clip
from vlm_stream.clips.packets import Colours, PickedClip, Sheet
from vlm_stream.clips.parse import gives_picture, open_file, parse_clip
from vlm_stream.clips.sample import ClipItem, SampleTable, cut_to_items, decode_sample, encode_sample, spare_ranges
from vlm_stream.clips.table import ClipTable, Codec

__all__ = [
    "ClipCut",
    "ClipItem",
    "ClipRun",
    "ClipTable",
    "Codec",
    "Colours",
    "PickedClip",
    "SampleTable",
    "Sheet",
    "cut_clip",
    "cut_to_items",
    "decode_sample",
    "encode_sample",
    "gives_picture",
    "open_file",
    "parse_clip",
    "spare_ranges",
]
