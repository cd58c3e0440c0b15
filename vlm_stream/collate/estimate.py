"""NeMo Automodel's approximations of lengths, for map-style samples.

Enter dicts with `mm_inputs_meta` and `_text_tokens`; leave numbers. Video limits hold for the whole clip here, whatever
the family; the exact counts are those of `vlm_stream.tokens`.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from vlm_stream.conversation import given_tokens
from vlm_stream.tokens import CHARACTERS_PER_TOKEN, smart_resize_image, smart_resize_video

GUESSED_TOKENS: Final = 500
"""What NeMo Automodel takes a medium for of which nothing is known."""


def _first_truthy(part: Any, attribute: str, edge: str, default: int) -> int:
    size = getattr(part, "size", None) or {}

    def look_up(key: str) -> Any:
        return size.get(key) if hasattr(size, "get") else getattr(size, key, None)

    return int(getattr(part, attribute, None) or look_up(attribute) or look_up(edge) or default)


def _read(part: Any, name: str, default: float | None) -> Any:
    """Return an attribute; a present None counts as absent."""
    value = getattr(part, name, None)
    return default if value is None else value


def extract_image_config(processor: Any) -> dict[str, int] | None:
    """Return patch size, merge size, factor and pixel limits of the image processor; None if there is none."""
    part = getattr(processor, "image_processor", None)
    if part is None:
        return None
    patch, merge = int(_read(part, "patch_size", 14)), int(_read(part, "merge_size", 2))
    return {
        "patch_size": patch,
        "merge_size": merge,
        "factor": patch * merge,
        "min_pixels": _first_truthy(part, "min_pixels", "shortest_edge", 3136),
        "max_pixels": _first_truthy(part, "max_pixels", "longest_edge", 1003520),
    }


def extract_video_config(processor: Any) -> dict[str, Any] | None:
    """Return what `estimate_video_tokens` needs of the video processor; None if there is none."""
    part = getattr(processor, "video_processor", None)
    if part is None:
        return None
    patch, merge = int(_read(part, "patch_size", 16)), int(_read(part, "merge_size", 2))
    return {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": int(_read(part, "temporal_patch_size", 2)),
        "factor": patch * merge,
        "min_pixels": _first_truthy(part, "min_pixels", "shortest_edge", 16384),
        "max_pixels": _first_truthy(part, "max_pixels", "longest_edge", 12582912),
        "fps": float(_read(part, "fps", 2.0)),
        "min_frames": int(_read(part, "min_frames", 4)),
        "max_frames": int(_read(part, "max_frames", 768)),
    }


def _given_tokens(meta: Any) -> int | None:
    """Return the count that a dict-shaped entry states itself."""
    if isinstance(meta, dict) and "n_tokens" in meta:
        return int(meta["n_tokens"])
    return None


def estimate_image_tokens(img_meta: Any, image_cfg: Mapping[str, Any]) -> int:
    """Estimate an image.

    Args:
        img_meta: `[height, width]`, or a dict with these keys or with `n_tokens`.
        image_cfg: What `extract_image_config` returns.

    >>> cfg = {"patch_size": 14, "merge_size": 2, "factor": 28, "min_pixels": 3136, "max_pixels": 1003520}
    >>> estimate_image_tokens([280, 560], cfg)
    200
    """
    given = _given_tokens(img_meta)
    if given is not None:
        return given
    if isinstance(img_meta, dict):
        if "height" not in img_meta or "width" not in img_meta:
            return GUESSED_TOKENS
        img_meta = [img_meta["height"], img_meta["width"]]
    height, width = (int(side) for side in img_meta[:2])
    limits = image_cfg["factor"], image_cfg["min_pixels"], image_cfg["max_pixels"]
    high, wide = smart_resize_image(height, width, *limits)
    patch = image_cfg["patch_size"]
    return int((high // patch) * (wide // patch) // image_cfg["merge_size"] ** 2)


def estimate_video_tokens(vid_meta: Any, video_cfg: Mapping[str, Any]) -> int:
    """Estimate a video.

    Args:
        vid_meta: `[total_frames, height, width, fps, duration]`, or a dict with these keys or with `n_tokens`. A rate
            or a duration of None reads as 0: not known.
        video_cfg: What `extract_video_config` returns; an `fps` of None reads as 2.0.

    Returns:
        Tokens, by limits that hold for the whole clip.
    """
    given = _given_tokens(vid_meta)
    if given is not None:
        return given
    if isinstance(vid_meta, dict):
        if not {"total_frames", "height", "width"} <= set(vid_meta):
            return GUESSED_TOKENS
        vid_meta = [vid_meta.get(key) for key in ("total_frames", "height", "width", "fps", "duration")]
    total, height, width = (int(number or 0) for number in vid_meta[:3])
    fps, duration = (float(number or 0.0) for number in (*vid_meta[3:5], 0.0, 0.0)[:2])
    frames = _estimate_frames(total, fps, duration, video_cfg)
    temporal = video_cfg["temporal_patch_size"]
    frames = math.ceil(frames / temporal) * temporal
    limits = video_cfg["factor"], video_cfg["min_pixels"], video_cfg["max_pixels"]
    high, wide = smart_resize_video(frames, height, width, temporal, *limits)
    patch = video_cfg["patch_size"]
    return int((frames // temporal) * (high // patch) * (wide // patch) // video_cfg["merge_size"] ** 2)


def _estimate_frames(total: int, fps: float, duration: float, video_cfg: Mapping[str, Any]) -> int:
    rate = video_cfg["fps"] or 2.0
    if total == 0 and fps > 0:
        total = int(duration * fps)
    frames = max(1, int(total / fps * rate)) if fps > 0 else max(1, int(duration * rate))
    return max(int(video_cfg["min_frames"]), min(total, int(video_cfg["max_frames"]), frames))


def estimate_sample_length(
    example: Mapping[str, Any],
    image_cfg: Mapping[str, Any] | None = None,
    video_cfg: Mapping[str, Any] | None = None,
    return_media_tokens: bool = False,
) -> int | tuple[int, int]:
    """Estimate a sample: its text and its media, without the chat template's own tokens.

    Text is `_text_tokens` if it is given, else a third of the characters. Media are `_media_tokens` if they are given,
    else counted from `mm_inputs_meta` where it has an entry and the config for it exists, else as 500 each.

    Args:
        example: A sample with `conversation`, perhaps `_text_tokens`, `_media_tokens` and `mm_inputs_meta`.
        image_cfg: What `extract_image_config` returns.
        video_cfg: What `extract_video_config` returns.
        return_media_tokens: Also return the share of the media.
    """
    characters = images = videos = 0
    for message in example.get("conversation") or ():
        content = message.get("content") or ""
        if isinstance(content, str):
            characters += len(content)
            continue
        for item in content:
            if isinstance(item, dict):
                images += item.get("type") == "image"
                videos += item.get("type") == "video"
                characters += len(item.get("text") or "") if item.get("type") == "text" else 0
    given = given_tokens(example.get("_text_tokens"))
    text = given if given is not None else characters // CHARACTERS_PER_TOKEN
    known = given_tokens(example.get("_media_tokens"))
    meta = example.get("mm_inputs_meta")
    if known is not None:
        media = known
    elif meta is None or (image_cfg is None and video_cfg is None):
        media = GUESSED_TOKENS * (images + videos)
    else:
        media = _estimate_media(meta.get("images_meta"), images, image_cfg, estimate_image_tokens)
        media += _estimate_media(meta.get("videos_meta"), videos, video_cfg, estimate_video_tokens)
    return (text + media, media) if return_media_tokens else text + media


def _estimate_media(entries: Any, num_media: int, cfg: Mapping[str, Any] | None, estimate: Any) -> int:
    """Estimate one kind of media; without its config or its entries each counts as a guess, never as nothing."""
    if cfg is None or not entries:
        return GUESSED_TOKENS * num_media
    return sum(estimate(entry, cfg) for entry in entries if entry is not None)
