"""Media as pages show them: their types, thumbnails, images as the vision tower gets them, frames of clips.

Enters: members, by name or by bytes. Leaves: types, JPEG bytes. What cannot be decoded raises `BadSampleError`, as in
a run.
"""

from __future__ import annotations

import io
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.format import medium_of
from vlm_stream.media import ImageConfig, decode_image, decode_video, to_rgb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from PIL import Image

    from vlm_stream.conversation import Seconds
    from vlm_stream.format import Drawn
    from vlm_stream.media import DecodedVideo, VideoInfo
    from vlm_stream.tokens import Resized

MAX_FRAMES: Final = 24
"""Frames of a clip that are shown."""
_THUMB: Final = 288
_LARGEST: Final = 1400
"""Longest side of a picture on a page."""
_MIN_CELL: Final = 6
"""Cells of a grid that are smaller on the page are not drawn."""
_TYPES: Final = {
    **dict.fromkeys(("jpg", "jpeg"), "image/jpeg"),
    **{name: f"image/{name}" for name in ("png", "webp", "gif", "bmp", "avif")},
    **dict.fromkeys(("mp4", "m4v", "mov"), "video/mp4"),
    **{name: f"video/{name}" for name in ("webm",)},
    **{name: f"audio/{name}" for name in ("wav", "flac", "ogg")},
    "mp3": "audio/mpeg",
    "m4a": "audio/mp4",
    "opus": "audio/ogg",
}
"""What browsers show; every other member is handed out as a file, under no type that anything executes."""


def type_of(member: str) -> str | None:
    """Return the type under which a browser shows a member; None: it shows no such thing."""
    return _TYPES.get(member.rpartition(".")[2].lower())


def load_decoders() -> None:
    """Import what decodes images and clips: the first ones need not wait for it."""
    from PIL import Image

    Image.init()
    import_module("av")


def first_medium(drawn: Drawn) -> str | None:
    """Return the name of the first member that is a picture or a clip; else that of a sound; None: there is none."""
    media = [(medium_of(name), name) for name, *_ in drawn.members]
    for kinds in (("image", "video"), ("audio",)):
        for medium, name in media:
            if medium in kinds:
                return name
    return None


def to_jpeg(picture: Image.Image, quality: int = 84) -> bytes:
    """Return the bytes of a picture."""
    buffer = io.BytesIO()
    to_rgb(picture).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def thumbnail(data: bytes, medium: str, seconds: Seconds | None = None) -> bytes:
    """Return a small picture of an image or of the middle of a clip, or of a part of it."""
    if medium == "video":
        from PIL import Image

        clip = decode_video(data, lambda info: [info.frames // 2], seconds=seconds)
        picture = Image.fromarray(clip.frames[0])
    else:
        picture = decode_image(data, least=_THUMB)
    picture.thumbnail((_THUMB, _THUMB))
    return to_jpeg(picture, 80)


def as_seen(data: bytes, resized: Resized | None, *, exif_rotate: bool = False) -> bytes:
    """Return an image in the size that the vision tower gets it in, with the squares that become tokens."""
    from PIL import Image

    picture = decode_image(data, ImageConfig(exif_rotate=exif_rotate))
    if resized is None:
        picture.thumbnail((_LARGEST, _LARGEST))
        return to_jpeg(picture)
    picture = picture.resize((resized.width, resized.height), Image.Resampling.BICUBIC)
    scale = _page_scale(max(picture.size))
    if scale != 1:
        size = (max(round(picture.width * scale), 1), max(round(picture.height * scale), 1))
        picture = picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC)
    return to_jpeg(_with_grid(picture, scale, resized), 88)


def _page_scale(longest: int) -> float:
    """Return how much a picture is scaled for the page: small ones up by whole numbers, so that patches are seen."""
    return _LARGEST / longest if longest > _LARGEST else float(max(min(560 // longest, 6), 1))


def _with_grid(picture: Image.Image, scale: float, resized: Resized) -> Image.Image:
    from PIL import Image, ImageDraw

    layer = Image.new("RGBA", picture.size, (0, 0, 0, 0))
    canvas = ImageDraw.Draw(layer)
    token = resized.patch_size * resized.merge_size
    for step, colour in ((resized.patch_size, (255, 255, 255, 46)), (token, (255, 255, 255, 150))):
        if step * scale < _MIN_CELL:
            continue
        for x in range(step, resized.width, step):
            canvas.line((x * scale, 0, x * scale, picture.height), fill=colour)
        for y in range(step, resized.height, step):
            canvas.line((0, y * scale, picture.width, y * scale), fill=colour)
    return Image.alpha_composite(picture.convert("RGBA"), layer)


def decode_frames(decode: Callable[[Callable[[VideoInfo], Sequence[int]]], DecodedVideo], pick: Any) -> list[bytes]:
    """Return pictures of the frames that a rule picks, at most `MAX_FRAMES` of them, evenly.

    Args:
        decode: Decodes the frames that the function it is given names.
        pick: The rule.
    """
    from PIL import Image

    clip = decode(lambda info: shown_frames(list(pick(info))))
    pictures = []
    for frame in clip.frames:
        picture = Image.fromarray(frame)
        picture.thumbnail((_THUMB, _THUMB))
        pictures.append(to_jpeg(picture, 78))
    return pictures


def shown_frames(indices: list[int]) -> list[int]:
    """Return those of the picked frames that are shown, evenly over the clip.

    >>> shown_frames([3, 5]), len(shown_frames(list(range(100))))
    ([3, 5], 24)
    """
    if len(indices) <= MAX_FRAMES:
        return indices
    return [indices[round(number * (len(indices) - 1) / (MAX_FRAMES - 1))] for number in range(MAX_FRAMES)]


def half_blocks(picture: Image.Image, columns: int) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return a picture as rows of character cells, each the colour of its upper and of its lower half."""
    from PIL import Image

    rows = max(round(picture.height / picture.width * columns / 2), 1)
    small = picture.convert("RGB").resize((columns, rows * 2), Image.Resampling.BILINEAR)
    pixels: Any = small.load()
    return [[(pixels[x, 2 * y], pixels[x, 2 * y + 1]) for x in range(columns)] for y in range(rows)]
