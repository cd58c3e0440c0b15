"""Images in encodings that real datasets hold now and then: print colours, palettes, deep grey, turned by a tag."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vlm_stream.testing import make_toy_image
from vlm_stream.testing.toy_media import make_toy_pixels, save_image


def make_cmyk_jpeg(height: int, width: int, seed: int = 0) -> bytes:
    """Return a JPEG with the four channels of print."""
    return save_image(make_toy_image(height, width, seed).convert("CMYK"), "JPEG")


def make_rotated_jpeg(height: int, width: int, seed: int = 0, *, orientation: int = 6) -> bytes:
    """Return a JPEG stored as `height` x `width` whose EXIF orientation (1 to 8) asks viewers to turn it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save_image(make_toy_image(height, width, seed), "JPEG", exif=exif)


def make_palette_gif(height: int, width: int, seed: int = 0) -> bytes:
    """Return a GIF of one frame."""
    return save_image(make_toy_image(height, width, seed).quantize(16), "GIF")


def make_16bit_png(height: int, width: int, seed: int = 0) -> bytes:
    """Return a grey PNG with 16 bits for each pixel, as scanners and medical devices write them."""
    grey = make_toy_pixels(height, width, seed).astype(np.uint16).sum(axis=2, dtype=np.uint16) * 85  # up to 65025
    return save_image(Image.fromarray(grey), "PNG")
