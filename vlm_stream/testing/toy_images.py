"""Seeded images as bytes, in the encodings that real datasets hold: enter sizes and a seed, leaves a file's content.

Every picture is smooth colour with a few rectangles on it: it compresses as photographs do, and no two seeds agree.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

__all__ = [
    "make_16bit_png",
    "make_cmyk_jpeg",
    "make_grey_jpeg",
    "make_jpeg",
    "make_palette_gif",
    "make_palette_png",
    "make_png_with_alpha",
    "make_rotated_jpeg",
    "make_toy_image",
]

_EXIF_ORIENTATION = 0x0112


def make_toy_pixels(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return [height, width, 3] pixels."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3)).astype(np.float32)
    down = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    across = np.linspace(0, 1, width, dtype=np.float32)[None, :, None]
    upper = corners[0, 0] * (1 - across) + corners[0, 1] * across  # [1, width, 3]
    lower = corners[1, 0] * (1 - across) + corners[1, 1] * across
    pixels: npt.NDArray[np.uint8] = (upper * (1 - down) + lower * down).astype(np.uint8)  # [height, width, 3]
    for _ in range(4):
        top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
        tall, wide = int(rng.integers(1, height // 2 + 2)), int(rng.integers(1, width // 2 + 2))
        pixels[top : top + tall, left : left + wide] = rng.integers(0, 256, 3)
    return pixels


def make_toy_image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an RGB image.

    >>> make_toy_image(48, 64).size
    (64, 48)
    """
    from PIL import Image

    return Image.fromarray(make_toy_pixels(height, width, seed))


def _save(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def make_jpeg(height: int, width: int, seed: int = 0, *, quality: int = 85) -> bytes:
    """Return a JPEG.

    >>> make_jpeg(48, 64)[:2].hex()
    'ffd8'
    """
    return _save(make_toy_image(height, width, seed), "JPEG", quality=quality)


def make_grey_jpeg(height: int, width: int, seed: int = 0) -> bytes:
    """Return a JPEG with one channel."""
    return _save(make_toy_image(height, width, seed).convert("L"), "JPEG")


def make_cmyk_jpeg(height: int, width: int, seed: int = 0) -> bytes:
    """Return a JPEG with the four channels of print."""
    return _save(make_toy_image(height, width, seed).convert("CMYK"), "JPEG")


def make_rotated_jpeg(height: int, width: int, seed: int = 0, *, orientation: int = 6) -> bytes:
    """Return a JPEG stored as `height` x `width` whose EXIF orientation (1 to 8) asks viewers to turn it."""
    from PIL import Image

    exif = Image.Exif()
    exif[_EXIF_ORIENTATION] = orientation
    return _save(make_toy_image(height, width, seed), "JPEG", exif=exif)


def make_png_with_alpha(height: int, width: int, seed: int = 0) -> bytes:
    """Return a PNG with four channels, transparent on the left and opaque on the right."""
    image = make_toy_image(height, width, seed)
    alpha = np.broadcast_to(np.linspace(0, 255, width).astype(np.uint8), (height, width))
    from PIL import Image

    image.putalpha(Image.fromarray(np.ascontiguousarray(alpha)))
    return _save(image, "PNG")


def make_palette_png(height: int, width: int, seed: int = 0) -> bytes:
    """Return a PNG whose pixels are numbers of a palette, one of them transparent."""
    return _save(make_toy_image(height, width, seed).quantize(16), "PNG", transparency=0)


def make_palette_gif(height: int, width: int, seed: int = 0) -> bytes:
    """Return a GIF of one frame."""
    return _save(make_toy_image(height, width, seed).quantize(16), "GIF")


def make_16bit_png(height: int, width: int, seed: int = 0) -> bytes:
    """Return a grey PNG with 16 bits for each pixel, as scanners and medical devices write them."""
    from PIL import Image

    grey = make_toy_pixels(height, width, seed).astype(np.uint16).sum(axis=2, dtype=np.uint16) * 85  # up to 65025
    return _save(Image.fromarray(grey), "PNG")
