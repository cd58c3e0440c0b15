"""Grids from sizes, no pixels: for ranks that need a sample's ids and not its media.

Enters: a processor, and media of which only sizes are known. Leaves: a copy of the processor whose parts for images and
videos answer with the grids that the real ones would give, and stand-ins for the media: arrays of the right shape that
take no memory. All text (placeholders, timestamps, token types, seconds per patch) is then the processor's own work.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from vlm_stream.conversation import Conversation, Item, frame_rate, iter_media, map_media, without_span
from vlm_stream.encode.load_media import LoadedMedia, ProcessorReads, check_supported, picker
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.media import DecodedVideo, VideoInfo
from vlm_stream.tokens import FrameRule, Geometry, ImageSize, MediaSizes, VideoSize, read_family, resample_length

if TYPE_CHECKING:
    import torch

    from vlm_stream.encode.encoder import EncodeConfig

_GRID_FAMILIES: Final = ("glm46v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
"""Families whose text depends on media through grids alone."""


def make_grid_processor(processor: Any, config: EncodeConfig) -> Any:
    """Return a copy of the processor that never sees a pixel; the original is not changed."""
    family = read_family(processor)
    if family not in _GRID_FAMILIES:
        raise ConfigError(
            f"{type(processor).__name__} cannot be run without pixels: how its text follows from the sizes of media is "
            f"known for {', '.join(_GRID_FAMILIES)}. Let every rank read media (pixels=True) and drop them afterwards."
        )
    if config.image.exif_rotate:
        raise ConfigError(
            "exif_rotate can change the sizes of media, which are read from the index where there are no pixels, so "
            "ranks would disagree on tokens. Leave it off."
        )
    geometry = Geometry.from_processor(processor)
    copied = copy.copy(processor)
    copied.image_processor = _ImageGrids(processor.image_processor, geometry.image)
    copied.video_processor = _VideoGrids(processor.video_processor, geometry.video)
    return copied


class _Part:
    """A part of a processor: its settings, and grids instead of its work."""

    def __init__(self, part: Any, rule: Any) -> None:
        self._part = part
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def check_shapes(self, sides: Any) -> None:
        """Refuse what the real part refuses, so that the sample is bad on every rank."""
        for height, width in sides.tolist():
            if problem := self._rule.find_problem(height, width):
                raise BadSampleError("encode", "extreme_shape", f"A medium cannot be used: {problem}.")


class _ImageGrids(_Part):
    def __call__(self, images: Any, **_: Any) -> dict[str, Any]:
        shapes = _shapes(images)  # [m, 3]
        self.check_shapes(shapes[:, :2])
        return {"image_grid_thw": _as_tensor(self._rule.grid_images(shapes[:, 0], shapes[:, 1]))}


class _VideoGrids(_Part):
    def __call__(self, videos: Any, *, video_metadata: Any, **_: Any) -> dict[str, Any]:
        from transformers.video_utils import VideoMetadata

        shapes = _shapes(videos)  # [m, 4]
        self.check_shapes(shapes[:, 1:3])
        grids = self._rule.grid_videos(shapes[:, 0], shapes[:, 1], shapes[:, 2])
        return {"video_grid_thw": _as_tensor(grids), "video_metadata": [VideoMetadata(**v) for v in video_metadata]}


def _shapes(nested: Any) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the shapes of stand-ins, which come in a list per sample."""
    return np.asarray([medium.shape for media in nested for medium in media], np.int64)


def _as_tensor(grids: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(grids)


def stand_in_media(conversation: Conversation, sizes: MediaSizes, reads: ProcessorReads) -> LoadedMedia:
    """Return arrays of the shapes that `load_media` would give, with the same facts about videos."""
    loaded = LoadedMedia()
    left: dict[str, list[Any]] = {"image": list(sizes.images), "video": list(sizes.videos), "audio": list(sizes.audios)}
    for item in iter_media(conversation):
        check_supported(item, reads)
        queue = left[item["type"]]
        if not queue:
            raise _mismatch(item["type"], "more")
        if item["type"] == "image":
            loaded.images.append(_blank_image(queue.pop(0)))
        elif item["type"] == "video":
            loaded.videos.append(_blank_video(item, queue.pop(0), reads.frame_rule))
        else:
            queue.pop(0)
    for medium, queue in left.items():
        if queue:
            raise _mismatch(medium, "fewer")
    return loaded


def fill_blank(conversation: Conversation, sizes: MediaSizes, reads: ProcessorReads) -> Conversation:
    """Return the conversation with blank media of these sizes in the place of its own."""
    loaded = stand_in_media(conversation, sizes, reads)
    images, videos = iter(loaded.images), iter(loaded.videos)
    sounds = iter(sizes.audios)

    def fill(item: Item) -> Item:
        if item.get("type") == "image":
            from PIL import Image

            height, width, _ = np.shape(cast("Any", next(images)))
            return {**item, "image": Image.new("RGB", (width, height))}
        if item.get("type") == "video":
            clip = next(videos)
            facts = {"_video_fps": clip.info.fps, "_frame_indices": clip.indices, "_total_frames": clip.info.frames}
            return without_span({**item, "video": clip.frames, **facts})
        if item.get("type") == "audio":
            sound = next(sounds)
            num = int(resample_length(np.asarray(sound.samples), np.asarray(sound.rate), reads.audio_rate))
            return without_span({**item, "audio": np.zeros(num, np.float32)})
        return item

    return map_media(conversation, fill)


def _mismatch(medium: str, how: str) -> BadSampleError:
    return BadSampleError(
        "encode",
        "media_mismatch",
        f"The conversation shows {how} {medium}s than the index has sizes of, so its tokens cannot be made without "
        f"pixels. Index the shard again.",
    )


def _blank_image(size: ImageSize) -> Any:
    return np.broadcast_to(np.uint8(0), (size.height, size.width, 3))


def _blank_video(item: Item, size: VideoSize, rule: FrameRule) -> DecodedVideo:
    fps, seconds = size.fps, size.seconds
    if isinstance(item["video"], (list, tuple)):  # still images: what decoding assumes where the item has no rate
        fps = frame_rate(item) or rule.fps or 0.0
        seconds = size.frames / fps if fps else 0.0
    info = VideoInfo(size.frames, size.height, size.width, fps, seconds)
    indices = tuple(int(index) for index in picker(rule, item)(info))
    frames = np.broadcast_to(np.uint8(0), (len(indices), size.height, size.width, 3))
    return DecodedVideo(frames=cast("Any", frames), info=info, indices=indices)
