"""Pixels: what leaves a worker as uint8 and becomes the processor's own pixels where the model is.

Enters: a transformers processor; later a batch. Leaves: a copy of the processor that stops before rescaling and
normalising (still images of patchified families also without their temporal copy: an eighth of the bytes), and
`finish_pixels`, which does the rest on any device. Must not be known here: conversations, padding, packing, shards.

Files, in the order the data meets them:
    spec.py              what a batch says of its pixels
    uint8_processor.py   one part of a processor that stops early
    path.py              `CompactPath`: a whole processor, tried out
    finish.py            `finish_pixels`
    device_prefetch.py   `DeviceFeed`: batches finished on the device, one ahead
"""

from __future__ import annotations

from vlm_stream.keys import PIXEL_SPEC_KEY as PIXELS_KEY
from vlm_stream.pixels.device_prefetch import DeviceFeed
from vlm_stream.pixels.finish import DEFAULT_DTYPE, finish_pixels
from vlm_stream.pixels.path import CompactPath, find_compact_path
from vlm_stream.pixels.spec import PartSpec, PixelSpec, carry_spec

__all__ = [
    "DEFAULT_DTYPE",
    "PIXELS_KEY",
    "CompactPath",
    "DeviceFeed",
    "PartSpec",
    "PixelSpec",
    "carry_spec",
    "find_compact_path",
    "finish_pixels",
]
