"""From the frame rule of a processor to the function that `media` asks which frames to decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlm_stream.conversation import Item
    from vlm_stream.encode.config import EncodeConfig
    from vlm_stream.media import VideoInfo

__all__ = ["FrameRule", "frame_rule", "picker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRule:
    """How many frames of a video a model sees."""

    fps: float | None
    min_frames: int
    max_frames: int | None
    temporal_patch_size: int


def frame_rule(processor: Any, config: EncodeConfig) -> FrameRule:
    """Return the processor's rule with the user's overrides."""
    video = getattr(processor, "video_processor", None)
    return FrameRule(
        fps=config.fps or getattr(video, "fps", None) or 2.0,
        min_frames=config.min_frames or getattr(video, "min_frames", None) or 4,
        max_frames=config.max_frames or getattr(video, "max_frames", None) or 768,
        temporal_patch_size=getattr(video, "temporal_patch_size", None) or 2,
    )


def picker(rule: FrameRule, item: Item) -> Callable[[VideoInfo], Sequence[int]]:
    """Return the function that names the frames of this item."""

    def pick(info: VideoInfo) -> Sequence[int]:
        import numpy as np

        step = rule.temporal_patch_size
        named = item.get("frame_indices")
        if named is not None or isinstance(item["video"], (list, tuple)):
            indices = [min(max(int(i), 0), info.frames - 1) for i in (named or range(info.frames))]
            return indices + [indices[-1]] * (-len(indices) % step)
        count = info.frames / info.fps * rule.fps if rule.fps and info.fps > 0 else info.frames
        count = min(max(count, rule.min_frames), rule.max_frames or info.frames, info.frames)
        rounded = max(step, -(-int(count) // step) * step)
        return [int(i) for i in np.rint(np.linspace(0, info.frames - 1, rounded))]

    return pick
