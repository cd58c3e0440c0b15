"""Read single settings of a processor's parts: enters a processor object, leave the numbers that its calls will use."""

from __future__ import annotations

from typing import Any, Final

from vlm_stream.errors import ConfigError
from vlm_stream.tokens.frames import FrameRule

__all__ = [
    "Part",
    "audio_part",
    "image_part",
    "read_cap",
    "read_frame_rule",
    "read_grid",
    "read_pixel_limits",
    "video_part",
]

_DEFAULT_FPS: Final = 2.0
"""Processors without a rate of their own would take every frame of a file: 10 s of 720p would be 108,029 tokens."""


class Part:
    """One part of a processor, seen as its processor will call it: class-wide defaults win over the part's config."""

    def __init__(self, processor: Any, name: str, modality: str) -> None:
        self._part = getattr(processor, name, None)
        declared = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", None) or {}
        self._overrides = declared.get(modality, {})
        self._owner = f"{type(processor).__name__}.{name}"

    def read(self, name: str, default: Any = None) -> Any:
        """Return a setting; a present None reads as the default."""
        value = self._overrides.get(name)
        if value is None:
            value = getattr(self._part, name, None)
        return default if value is None else value

    def read_size(self, *names: str) -> int:
        """Return the first of these keys that the part's `size` (a dict or an object) holds."""
        size = self.read("size")
        for name in names:
            value = size.get(name) if hasattr(size, "get") else getattr(size, name, None)
            if value:
                return int(value)
        raise ConfigError(
            f"{self._owner} has no {' or '.join(names)} in its size ({size!r}), so its tokens cannot be counted. "
            "Complete the processor's config."
        )


def image_part(processor: Any) -> Part:
    """Return the image processor."""
    return Part(processor, "image_processor", "images_kwargs")


def video_part(processor: Any) -> Part:
    """Return the video processor."""
    return Part(processor, "video_processor", "videos_kwargs")


def audio_part(processor: Any, name: str = "feature_extractor") -> Part:
    """Return the feature extractor."""
    return Part(processor, name, "audio_kwargs")


def read_frame_rule(part: Part, temporal_patch_size: int, max_frames: int | None = None) -> FrameRule:
    """Return which frames are read, as far as the config says."""
    most = max_frames or part.read("max_frames", 768)
    return FrameRule(
        fps=float(part.read("fps", _DEFAULT_FPS)),
        min_frames=min(int(part.read("min_frames", 4)), int(most)),
        max_frames=int(most),
        temporal_patch_size=temporal_patch_size,
    )


def read_pixel_limits(part: Part) -> dict[str, int]:
    """Return the limits of a Qwen-like part; old versions keep them as attributes beside `size`."""
    return {
        "min_pixels": int(part.read("min_pixels") or part.read_size("min_pixels", "shortest_edge")),
        "max_pixels": int(part.read("max_pixels") or part.read_size("max_pixels", "longest_edge")),
    }


def read_grid(part: Part) -> dict[str, int]:
    """Return patch and merge size."""
    return {"patch_size": int(part.read("patch_size")), "merge_size": int(part.read("merge_size"))}


def read_cap(part: Part) -> int | None:
    """Return the tokens that frames must share, if the cap of Qwen's video processors is on."""
    return int(part.read("max_video_tokens")) if part.read("cap_pixels_per_frame") else None
