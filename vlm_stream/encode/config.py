"""What a user may choose about encoding one sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vlm_stream.errors import ConfigError
from vlm_stream.media import ImageConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlm_stream.media.video import VideoBackend
    from vlm_stream.tokens.frames import FrameRule

__all__ = ["EncodeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeConfig:
    """How one sample becomes tensors."""

    max_length: int | None = None
    """Longest sequence in tokens; None: any length."""
    overlong: Literal["bad", "truncate"] = "bad"
    """A longer sequence is a bad sample, or is cut at `max_length`. A cut through media is a bad sample either way."""
    inject_fake_image: bool = False
    """Give text-only samples a small white image that attention does not see, so that every rank runs its vision
    tower in every step."""
    image: ImageConfig = field(default_factory=ImageConfig)
    """How images are decoded."""
    video_backend: VideoBackend = "auto"
    """decord, av or torchcodec; auto: decord where it is installed, av otherwise."""
    frames: FrameRule | None = None
    """Which frames of a video are read; None: as the processor's own config says. Planning must count with the same."""
    allow_unlabelled: bool = False
    """Return samples in which nothing is to be learned, instead of calling them bad."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking`."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Options for every call of the processor."""
    pixels: Literal["full", "compact"] = "full"
    """`compact`: bytes that `finish_pixels` makes the processor's pixels of, on the trainer's device. Families without
    a compact path give full pixels and say so."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.overlong not in ("bad", "truncate"):
            raise ConfigError(f"overlong={self.overlong!r} means nothing here; use 'bad' or 'truncate'.")
        if self.pixels not in ("full", "compact"):
            raise ConfigError(f"pixels={self.pixels!r} means nothing here; use 'full' or 'compact'.")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length={self.max_length} leaves nothing to encode; use a number above 0, or None.")
