"""From the frame rule of a processor to the function that `media` asks which frames to decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlm_stream.conversation import named_frames
from vlm_stream.tokens.frames import FrameRule, frame_indices
from vlm_stream.tokens.geometry import Geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlm_stream.conversation import Item
    from vlm_stream.media import VideoInfo

__all__ = ["frame_rule", "picker"]


def frame_rule(processor: Any, override: FrameRule | None) -> FrameRule:
    """Return the rule that planning counts with: the given one, or the processor's own."""
    if override is not None or getattr(processor, "video_processor", None) is None:
        return override or FrameRule()
    return Geometry.from_processor(processor).frames


def picker(rule: FrameRule, item: Item) -> Callable[[VideoInfo], Sequence[int]]:
    """Return the function that names the frames of this item; a list of frames is taken whole."""

    def pick(info: VideoInfo) -> Sequence[int]:
        named: Sequence[int] | None = named_frames(item)
        if named is None and isinstance(item["video"], (list, tuple)):
            named = range(info.frames)
        indices: list[int] = frame_indices(info.frames, info.fps, rule, named).tolist()
        return indices

    return pick
