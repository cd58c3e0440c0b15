"""Images: bytes to a PIL image in RGB, or only its height and width from the header.

Enters: the bytes of one file, or its path. Leaves: what the model's processor takes. A file that cannot be decoded is a
bad sample, never a crash.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from vlm_stream.errors import BadSampleError, blame_sample
from vlm_stream.keys import IMAGE_FORMATS
from vlm_stream.media.limits import DEFAULT_LIMITS, MediaLimits

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

ImageData: TypeAlias = "bytes | bytearray | memoryview | str | Path"
_ORIENTATION: Final = 0x0112
_TURNED: Final = range(2, 9)
_SIDEWAYS: Final = range(5, 9)
"""Orientations whose height and width change places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """How images are decoded."""

    exif_rotate: bool = False
    """Turn images as their EXIF orientation says. Off, as in the processors. Datasets that were converted with
    `exif_rotate` say it of each image, because the sizes in their index are the turned ones."""


DEFAULT_IMAGE_CONFIG = ImageConfig()


def probe_image(data: ImageData, limits: MediaLimits = DEFAULT_LIMITS, *, exif_rotate: bool = False) -> tuple[int, int]:
    """Return (height, width) from the header alone, as stored or as turned; raise `BadSampleError` without a header."""
    with _open(data, limits, stage="convert") as image:
        width, height = image.size
        return (width, height) if exif_rotate and _orientation(image) in _SIDEWAYS else (height, width)


def is_turned(data: ImageData, limits: MediaLimits = DEFAULT_LIMITS) -> bool:
    """Tell whether bytes are an image that its EXIF orientation turns or mirrors."""
    try:
        with _open(data, limits, stage="convert") as image:
            return _orientation(image) in _TURNED
    except BadSampleError:
        return False


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF, which decoding passes over as well
        return 1


def decode_image(
    data: ImageData,
    config: ImageConfig = DEFAULT_IMAGE_CONFIG,
    limits: MediaLimits = DEFAULT_LIMITS,
    *,
    least: int | None = None,
) -> Image.Image:
    """Return the image in RGB, loaded; with `least` a JPEG may be smaller than stored, with sides of at least that."""
    image: Any = _open(data, limits, stage="decode")
    try:
        if image.format == "JPEG" and isinstance(data, (bytes, bytearray, memoryview)):
            image.decodermaxblock = len(data)  # in one piece: the decoder goes back where a piece ends, to whole rows
        if least is not None:
            image.draft("RGB", (least, least))
        image.load()
        if config.exif_rotate:
            from PIL import ImageOps

            image = ImageOps.exif_transpose(image)
        return to_rgb(image)
    except Exception as error:  # Pillow's plugins raise nearly anything on damaged files
        raise blame_sample(error, "decode", "bad_image", "The image cannot be decoded") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB: itself when it is, because a needless conversion copies every pixel."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return _sixteen_bit_to_rgb(image)
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _sixteen_bit_to_rgb(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey to 8 bits; Pillow's own conversion would clip everything above 255 to white."""
    import numpy as np
    from PIL import Image

    grey = np.asarray(image, dtype=np.float64)
    high = 65535.0 if image.mode.startswith("I;16") or grey.max(initial=0) > 255 else 255.0
    eight_bit = np.clip(np.rint(grey * (255.0 / high)), 0, 255).astype(np.uint8)
    return Image.fromarray(eight_bit).convert("RGB")


def _open(data: ImageData, limits: MediaLimits, stage: str) -> Image.Image:
    from PIL import Image

    source: Any = io.BytesIO(data) if isinstance(data, (bytes, bytearray, memoryview)) else data
    try:
        Image.init()  # the formats that are registered, here or by the user
        image = Image.open(source, formats=[name for name in IMAGE_FORMATS if name in Image.OPEN])
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise blame_sample(error, stage, "image_too_large", "The image is too large to decode") from error
    except FileNotFoundError as error:
        raise BadSampleError(stage, "missing_file", f"There is no image file at {source}.") from error
    except Exception as error:
        raise blame_sample(error, stage, "bad_image", "The bytes are not an image") from error
    width, height = image.size
    limits.check_image(stage, width, height)
    if not width or not height:
        raise BadSampleError(stage, "bad_image", f"The image has {width}x{height} pixels.")
    return image
