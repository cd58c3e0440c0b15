"""Pixels: what leaves a worker as uint8 and becomes the processor's own pixels where the model is.

Enters: a transformers processor; later a batch. Leaves: a copy of the processor that stops before rescaling and
normalising (still images of patchified families also without their temporal copy: an eighth of the bytes), and
`finish_pixels`, which does the rest on any device. Must not be known here: conversations, padding, packing, shards.

`compact.py` has `CompactPath`, a processor whose parts stop early, tried out; `finish.py` what a batch says of its
pixels, `finish_pixels`, and `DeviceFeed`: batches finished on the device, one ahead.
"""

from vlm_stream.pixels.compact import CompactPath, find_compact_path
from vlm_stream.pixels.finish import DEFAULT_DTYPE, DeviceFeed, PartSpec, PixelSpec, carry_spec, finish_pixels
