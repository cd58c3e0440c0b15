"""The media of one conversation, decoded, in the order in which the conversation shows them.

Enters: media items that name members, and the members' bytes. Leaves: images, videos with their metadata, waveforms:
what the processor is called with. Which frames of a video are decoded is the rule of `vlm_stream.tokens.frames`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.conversation import Conversation, Item, iter_media
from vlm_stream.encode.fake_image import FAKE_IMAGE_NAME, make_fake_image
from vlm_stream.encode.pick_frames import FrameRule, frame_rule, picker
from vlm_stream.errors import BadSampleError
from vlm_stream.media import DecodedVideo, decode_audio, decode_frame_list, decode_image, decode_video

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL import Image

    from vlm_stream.encode.config import EncodeConfig

__all__ = ["LoadedMedia", "ProcessorReads", "audio_rate_of", "load_media", "processor_reads"]

_AUDIO_PARTS: Final = ("audio_processor", "feature_extractor")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorReads:
    """What a processor takes besides text, looked up once."""

    name: str
    """Its class, for messages."""
    media: frozenset[str]
    """Which of image, video and audio it has a part for."""
    frame_rule: FrameRule
    audio_rate: int


def processor_reads(processor: Any, config: EncodeConfig) -> ProcessorReads:
    """Look at the processor's parts."""
    parts = {"image": ("image_processor",), "video": ("video_processor",), "audio": _AUDIO_PARTS}
    media = {m for m, names in parts.items() if any(getattr(processor, n, None) is not None for n in names)}
    return ProcessorReads(
        name=type(processor).__name__,
        media=frozenset(media),
        frame_rule=frame_rule(processor, config),
        audio_rate=audio_rate_of(processor),
    )


def audio_rate_of(processor: Any) -> int:
    """Return the sampling rate that the processor's audio part wants."""
    rates = (getattr(getattr(processor, name, None), "sampling_rate", None) for name in _AUDIO_PARTS)
    rate = next((rate for rate in rates if rate), None) or getattr(processor, "audio_sampling_rate", None)
    return int(rate or 16_000)


@dataclass(slots=True, eq=False)
class LoadedMedia:
    """What a processor takes besides text."""

    images: list[Image.Image] = field(default_factory=list)
    videos: list[DecodedVideo] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)

    def video_metadata(self) -> list[dict[str, Any]]:
        """Return the true facts of each video in the words of transformers."""
        return [
            {
                "total_num_frames": video.info.frames,
                "fps": video.info.fps or None,
                "width": video.info.width,
                "height": video.info.height,
                "duration": video.info.seconds,
                "frames_indices": list(video.indices),
            }
            for video in self.videos
        ]


def load_media(
    conversation: Conversation, members: Mapping[str, Any], config: EncodeConfig, reads: ProcessorReads
) -> LoadedMedia:
    """Decode all media; raise `BadSampleError` at the first that is missing, damaged or of no use to the processor."""
    loaded = LoadedMedia()
    for item in iter_media(conversation):
        where = item.get(item["type"])
        if item["type"] not in reads.media:
            raise BadSampleError(
                "encode",
                "unsupported_medium",
                f"{_name_of(where)}: {reads.name} does not read {item['type']}; the model would never see it.",
            )
        try:
            if item["type"] == "image":
                is_fake = isinstance(where, str) and where == FAKE_IMAGE_NAME and where not in members
                image = make_fake_image() if is_fake else decode_image(_bytes_of(where, members), config.image)
                loaded.images.append(image)
            elif item["type"] == "video":
                loaded.videos.append(_load_video(item, members, config, reads.frame_rule))
            else:
                loaded.audios.append(decode_audio(_bytes_of(where, members), reads.audio_rate))
        except BadSampleError as error:
            raise BadSampleError("decode", error.reason, f"{_name_of(where)}: {error}") from error
    return loaded


def _load_video(item: Item, members: Mapping[str, Any], config: EncodeConfig, rule: FrameRule) -> DecodedVideo:
    where = item["video"]
    pick = picker(rule, item)
    if isinstance(where, (list, tuple)):
        frames = [_bytes_of(name, members) for name in where]
        return decode_frame_list(frames, pick, item.get("fps") or rule.fps, config.image)
    return decode_video(_bytes_of(where, members), pick, config.video_backend)


def _bytes_of(where: Any, members: Mapping[str, Any]) -> Any:
    """Return the bytes of a member; an item may also hold bytes itself."""
    if isinstance(where, (bytes, bytearray, memoryview)):
        return where
    if where not in members:
        raise BadSampleError("decode", "missing_member", "the conversation names it, the sample does not hold it.")
    return members[where]


def _name_of(where: Any) -> str:
    if isinstance(where, (list, tuple)):
        return f"[{_name_of(where[0])}, ...]" if where else "[]"
    return where if isinstance(where, str) else type(where).__name__
