"""The media of one conversation, decoded, in the order in which the conversation shows them.

Enters: media items that name members (or files, or hold bytes or decoded objects), and the members' bytes. Leaves:
images, videos with their metadata, waveforms: what the processor is called with. Which frames of a video are decoded is
the rule of `vlm_stream.tokens`. A conversation without media may get a small white image, so that every rank runs its
vision tower; `mask_vision_tokens` hides it from attention, and packing must keep these zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.clips import PickedClip
from vlm_stream.conversation import Conversation, Item, frame_rate, iter_media, map_media, named_frames, named_span
from vlm_stream.encode.control_tokens import vision_token_ids
from vlm_stream.errors import BadSampleError, blame_sample
from vlm_stream.keys import EXIF_ROTATE, FAKE_IMAGE_SIZE
from vlm_stream.media import (
    LMDB_SEPARATOR,
    DecodedVideo,
    ImageConfig,
    MediaLimits,
    VideoInfo,
    decode_audio,
    decode_frame_list,
    decode_image,
    decode_picked,
    decode_video,
    read_lmdb,
    resample_audio,
    to_rgb,
)
from vlm_stream.tokens import FrameRule, Geometry, Processor, audio_rate, frame_indices, make_video_metadata, media_of

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from vlm_stream.encode.encoder import EncodeConfig
    from vlm_stream.tokens import MediaSizes

logger = logging.getLogger(__name__)

_FAKE_NAME: Final = "fake.png"  # what the injected item names instead of a member

_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorReads:
    """What a processor takes besides text, looked up once."""

    name: str  # its class, for messages
    media: frozenset[str]  # which of image, video and audio it has a part for
    frame_rule: FrameRule
    audio_rate: int


def processor_reads(processor: Processor, config: EncodeConfig) -> ProcessorReads:
    """Return which media a processor reads, and how."""
    return ProcessorReads(
        name=type(processor).__name__,
        media=frozenset(media_of(processor)),
        frame_rule=frame_rule(processor, config.frames),
        audio_rate=audio_rate(processor),
    )


def frame_rule(processor: Processor, override: FrameRule | None) -> FrameRule:
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


def name_frames(conversation: Conversation, sizes: MediaSizes) -> Conversation:
    """Return the conversation whose videos name the keyframes that the plan has chosen: it alone knows them."""
    if not any(video.keyframes for video in sizes.videos):
        return conversation
    videos = iter(sizes.videos)

    def named(item: Item) -> Item:
        chosen = next(videos).keyframes if item["type"] == "video" else ()
        return {**item, "frame_indices": list(chosen)} if chosen else item

    return map_media(conversation, named)


@dataclass(slots=True, eq=False)
class LoadedMedia:
    """What a processor takes besides text."""

    images: list[Image.Image] = field(default_factory=list)
    videos: list[DecodedVideo] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)

    def video_metadata(self) -> list[dict[str, Any]]:
        """Return the true facts of each video in the words of transformers."""
        return [
            make_video_metadata(video.info.frames, video.info.fps, video.info.seconds, video.indices)
            | {"height": video.info.height, "width": video.info.width}
            for video in self.videos
        ]


def load_media(
    conversation: Conversation, members: Mapping[str, Any], config: EncodeConfig, reads: ProcessorReads
) -> LoadedMedia:
    """Decode all media; raise `BadSampleError` at the first that is missing, damaged or of no use to the processor."""
    loaded = LoadedMedia()
    for item in iter_media(conversation):
        check_supported(item, reads)
        try:
            if item["type"] == "image":
                loaded.images.append(_load_image(item, members, config))
            elif item["type"] == "video":
                loaded.videos.append(_load_video(item, members, config, reads.frame_rule))
            else:
                loaded.audios.append(_load_audio(item, members, reads.audio_rate, config.limits))
        except Exception as error:  # decoders raise nearly anything on damaged bytes
            raise _named(error, item) from error
    return loaded


def _named(error: Exception, item: Item) -> BadSampleError:
    medium = item["type"]
    blamed = blame_sample(error, "decode", f"bad_{medium}", f"the {medium} cannot be decoded")
    return BadSampleError("decode", blamed.reason, f"{_name_of(item.get(medium))}: {blamed}")


def check_supported(item: Item, reads: ProcessorReads) -> None:
    """Raise `BadSampleError` for a medium that the processor has no part for."""
    if item["type"] not in reads.media:
        name = _name_of(item.get(item["type"]))
        raise BadSampleError(
            "encode",
            "unsupported_medium",
            f"{name}: {reads.name} does not read {item['type']}; the model would never see it.",
        )


def _image_config(item: Item, config: EncodeConfig) -> ImageConfig:
    """Return how the images of an item are decoded: turned, where the item says so."""
    return replace(config.image, exif_rotate=True) if item.get(EXIF_ROTATE) else config.image


def _load_image(item: Item, members: Mapping[str, Any], config: EncodeConfig) -> Image.Image:
    where: Any = item.get("image")
    if hasattr(where, "convert"):  # decoded already
        return to_rgb(where)
    if isinstance(where, str) and where == _FAKE_NAME and where not in members:
        return make_fake_image()
    return decode_image(_bytes_of(where, members), _image_config(item, config), config.limits)


def _load_video(item: Item, members: Mapping[str, Any], config: EncodeConfig, rule: FrameRule) -> DecodedVideo:
    where = item["video"]
    pick, seconds = picker(rule, item), named_span(item)
    if isinstance(where, (list, tuple)) and where and isinstance(where[0], (str, bytes, bytearray, memoryview)):
        frames = [_bytes_of(name, members) for name in where]
        return decode_frame_list(frames, pick, frame_rate(item) or rule.fps, _image_config(item, config), config.limits)
    if isinstance(where, (list, tuple)) or hasattr(where, "shape"):
        return _ready_frames(item, rule)
    data = _bytes_of(where, members)
    if isinstance(data, PickedClip):
        return decode_picked(data, pick, config.limits, seconds=seconds)
    return decode_video(data, pick, config.video_backend, config.limits, seconds=seconds)


def _ready_frames(item: Item, rule: FrameRule) -> DecodedVideo:
    """Take frames that somebody sampled already; `_video_fps` and `_frame_indices` say from where."""
    import numpy as np

    where = item["video"]
    frames = np.asarray(where) if hasattr(where, "shape") else np.stack([np.asarray(to_rgb(f)) for f in where])
    if frames.ndim != 4:
        raise BadSampleError("decode", "bad_video", f"Ready frames have the shape {frames.shape}, not [n, h, w, 3].")
    if frames.shape[-1] != 3:
        frames = frames.transpose(0, 2, 3, 1)
    indices = tuple(int(i) for i in item.get("_frame_indices") or range(len(frames)))
    fps = float(item.get("_video_fps") or item.get("fps") or rule.fps or 0.0)
    total = int(item.get("_total_frames") or max(indices) + 1)
    info = VideoInfo(total, frames.shape[1], frames.shape[2], fps, total / fps if fps else 0.0)
    return DecodedVideo(frames=frames, info=info, indices=indices)


def _load_audio(item: Item, members: Mapping[str, Any], rate: int, limits: MediaLimits) -> Any:
    """Return the waveform; ready ones come as an array at the right rate, (array, rate), or a dict with both."""
    where, seconds = item["audio"], named_span(item)
    if isinstance(where, dict) and "array" in where:
        return resample_audio(where["array"], int(where["sampling_rate"]), rate)
    if isinstance(where, (tuple, list)) and len(where) == 2 and not isinstance(where[0], str):
        return resample_audio(where[0], int(where[1]), rate)
    if hasattr(where, "shape"):
        return where
    return decode_audio(_bytes_of(where, members), rate, limits, seconds=seconds)


def _bytes_of(where: Any, members: Mapping[str, Any]) -> Any:
    """Return the bytes of a member; an item may also hold bytes, or the path of a file."""
    if isinstance(where, (bytes, bytearray, memoryview)):
        return where
    if isinstance(where, str) and where in members:
        return members[where]
    if isinstance(where, str) and LMDB_SEPARATOR in where:
        return read_lmdb(where)
    if isinstance(where, (str, Path)) and Path(where).is_file():
        return where
    raise BadSampleError("decode", "missing_member", "the conversation names it, the sample does not hold it.")


def _name_of(where: Any) -> str:
    if isinstance(where, (list, tuple)):
        return f"[{_name_of(where[0])}, ...]" if where else "[]"
    return where if isinstance(where, str) else type(where).__name__


def has_media(conversation: Conversation) -> bool:
    """Say whether any content item is an image or a video, by its type or by its keys."""
    return any(
        isinstance(item, dict) and (item.get("type") in ("image", "video") or "image" in item or "video" in item)
        for message in conversation
        if isinstance(message.get("content"), list)
        for item in message["content"]
    )


def make_fake_image() -> Image.Image:
    """Return the image that is shown where there is none."""
    from PIL import Image

    height, width = FAKE_IMAGE_SIZE
    return Image.new("RGB", (width, height), (255, 255, 255))


def inject_fake_image(conversation: Conversation, image: Any = _FAKE_NAME) -> Conversation:
    """Return a copy whose first user turn begins with the image; a turn is added when there is none."""
    item = {"type": "image", "image": image}
    messages = [dict(message) for message in conversation]
    for message in messages:
        if message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = [item, *content]
        elif isinstance(content, str):
            message["content"] = [item, {"type": "text", "text": content}]
        else:
            message["content"] = [item]
        return messages
    return [{"role": "user", "content": [item]}, *messages]


def mask_vision_tokens(processor: Processor, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the mask with 0 wherever the ids are vision tokens; both have the same shape."""
    import torch

    ids = vision_token_ids(processor)
    if not ids:
        name = type(processor).__name__
        if name not in _warned:
            _warned.add(name)
            logger.warning("%s names no vision tokens: fake images stay visible to attention.", name)
        return attention_mask
    vision = torch.isin(input_ids, torch.tensor(sorted(ids), device=input_ids.device))
    return attention_mask.masked_fill(vision, 0)
