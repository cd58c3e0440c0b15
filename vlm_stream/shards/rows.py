"""A row: what an index says of one sample, before it is a row of columns.

Enters: what the writer or the reader of a tar learned. Leaves: plain values in the order of the index's schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["AudioSize", "ImageSize", "MediaSizes", "MemberPlace", "SampleRow", "VideoSize"]


class ImageSize(NamedTuple):
    """An image as stored."""

    height: int
    width: int


class VideoSize(NamedTuple):
    """A video as stored."""

    frames: int
    height: int
    width: int
    fps: float
    seconds: float
    picked: int = 0
    """Frames that the sample names itself; 0: the training rule samples."""


class AudioSize(NamedTuple):
    """A sound as stored."""

    samples: int
    rate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSizes:
    """The sizes of one sample's media: an entry for each media item, in the order of the conversation."""

    images: tuple[ImageSize, ...] = ()
    videos: tuple[VideoSize, ...] = ()
    audios: tuple[AudioSize, ...] = ()


class MemberPlace(NamedTuple):
    """One file of a sample: name without the key, first content byte in the shard, content bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One sample in its shard."""

    key: str
    offset: int
    size: int
    crc32c: int
    text_tokens: int
    sizes: MediaSizes = MediaSizes()
    members: tuple[MemberPlace, ...] = ()
