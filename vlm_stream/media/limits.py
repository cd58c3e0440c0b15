"""How large media may be: one set of numbers, for conversion and for training.

A small file can claim, and also hold, pictures that take all memory of a machine. The defaults let pass whatever people
train on; where the data are not your own, set them close to what you expect.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from vlm_stream.errors import BadSampleError, ConfigError

if TYPE_CHECKING:
    from vlm_stream.media.seconds import VideoInfo

_HOW: Final = "media_limits sets the limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """The largest media that are decoded. What is larger is a bad sample."""

    image_pixels: int = 89_478_485
    """Pixels of one image, also of one frame of a list. Pillow's own limit."""
    video_pixels: int = 15_000_000
    """Pixels of one frame of a video; recordings of 5K screens have 14.7 million, 4K has 8.3."""
    video_frames: int = 2_000_000
    """Frames in a file or in a list, whether they are picked or not."""
    audio_seconds: int = 14_400
    """Seconds of one audio file."""
    decoded_bytes: int = 6 << 30
    """Bytes that decoding one video or audio file takes, before anything is resized: those of the picked frames, or of
    the samples. 768 frames of 1920x1080 take 4.8 GB."""
    file_bytes: int = 8 << 30
    """Bytes of one file that a conversion fetches."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"media_limits.{each.name} is {value!r}, but it must be a whole number of at least 1")

    def check_image(self, stage: str, width: int, height: int) -> None:
        """Raise `BadSampleError` for too large an image."""
        if width * height > self.image_pixels:
            fact = f"The image has {width}x{height} pixels, more than the limit of {self.image_pixels:,}"
            raise BadSampleError(stage, "image_too_large", f"{fact}; {_HOW} (image_pixels).")

    def check_video(self, stage: str, info: VideoInfo) -> None:
        """Raise `BadSampleError` for a video with too large or too many frames."""
        if info.width * info.height > self.video_pixels:
            fact = f"The frames have {info.width}x{info.height} pixels, more than the limit of {self.video_pixels:,}"
            raise BadSampleError(stage, "video_too_large", f"{fact}; {_HOW} (video_pixels).")
        self.check_frames(stage, info.frames)

    def check_frames(self, stage: str, num_frames: int) -> None:
        """Raise `BadSampleError` for too many frames of a video or a list."""
        if num_frames > self.video_frames:
            fact = f"The video has {num_frames:,} frames, more than the limit of {self.video_frames:,}"
            raise BadSampleError(stage, "video_too_large", f"{fact}; {_HOW} (video_frames).")

    def check_picked(self, info: VideoInfo, num_picked: int) -> None:
        """Raise `BadSampleError` where the picked frames would take too much memory."""
        size = num_picked * info.height * info.width * 3
        if size > self.decoded_bytes:
            raise BadSampleError(
                "decode",
                "video_too_large",
                f"{num_picked:,} frames of {info.width}x{info.height} pixels take {size:,} bytes, "
                f"more than the limit of {self.decoded_bytes:,}; read fewer frames (fps, max_frames), or raise "
                f"media_limits.decoded_bytes.",
            )

    def check_audio(self, stage: str, num_samples: int, rate: int, channels: int) -> None:
        """Raise `BadSampleError` for too long an audio file; its header alone is known."""
        if num_samples > self.audio_seconds * rate:
            fact = f"The audio lasts {num_samples / rate:,.0f} seconds, more than the limit of {self.audio_seconds:,}"
            raise BadSampleError(stage, "audio_too_large", f"{fact}; {_HOW} (audio_seconds).")
        if (size := num_samples * channels * 4) > self.decoded_bytes:
            fact = f"The audio takes {size:,} bytes in memory, more than the limit of {self.decoded_bytes:,}"
            raise BadSampleError(stage, "audio_too_large", f"{fact}; {_HOW} (decoded_bytes).")


DEFAULT_LIMITS: Final = MediaLimits()
