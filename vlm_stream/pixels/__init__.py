"""Pixels: what leaves a worker as uint8 and becomes the processor's own pixels where the model is.

Enters: a transformers processor; later a batch. Leaves: a twin of the processor that stops before rescaling and
normalising (still images of patchified families also without their temporal copy: an eighth of the bytes), and
`finish_pixels`, which does the rest on any device. Must not be known here: conversations, padding, packing, shards.

Files, in the order the data meets them: `spec.py` (what a batch says of its pixels), `rgb_view.py` (an image's memory
as a tensor), `part_twin.py`, `patchified.py`, `crops.py` (one part of a processor), `path.py` (`CompactPath`),
`finish.py` (`finish_pixels`), `feed.py` (`DeviceFeed`).
"""

from __future__ import annotations

from vlm_stream.pixels.feed import DeviceFeed
from vlm_stream.pixels.finish import finish_pixels
from vlm_stream.pixels.path import CompactPath
from vlm_stream.pixels.spec import PIXELS_KEY, PartSpec, PixelSpec, carry_spec

__all__ = ["PIXELS_KEY", "CompactPath", "DeviceFeed", "PartSpec", "PixelSpec", "carry_spec", "finish_pixels"]
