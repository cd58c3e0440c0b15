"""Media: bytes of images, videos and audio become what a processor takes.

Enters: the bytes of one file (or a path, at conversion). Leaves: PIL images in RGB, frames with the true facts of their
video, mono waveforms; or, by `probe_*`, only what the header says. Must not be known here: processors, conversations,
tar files, and which frames of a video a model wants (a function comes in from outside).

Files: `container.py`, `limits.py` (what no decoder is given), `image.py`, `video.py`, `backends.py` (its libraries),
`audio.py`, `seconds.py` (parts of clips and sounds), `lmdb.py`.
"""

from __future__ import annotations

from vlm_stream.media.audio import AudioInfo, decode_audio, probe_audio, resample_audio
from vlm_stream.media.backends import VideoBackend
from vlm_stream.media.container import check_container
from vlm_stream.media.image import ImageConfig, decode_image, is_turned, probe_image, to_rgb
from vlm_stream.media.limits import DEFAULT_LIMITS, MediaLimits
from vlm_stream.media.lmdb import LMDB_SEPARATOR, read_lmdb
from vlm_stream.media.seconds import VideoInfo, cut_info, find_frames
from vlm_stream.media.video import (
    DecodedVideo,
    decode_frame_list,
    decode_picked,
    decode_video,
    decodes_by_frames,
    probe_video,
)

__all__ = [
    "DEFAULT_LIMITS",
    "LMDB_SEPARATOR",
    "AudioInfo",
    "DecodedVideo",
    "ImageConfig",
    "MediaLimits",
    "VideoBackend",
    "VideoInfo",
    "check_container",
    "cut_info",
    "decode_audio",
    "decode_frame_list",
    "decode_image",
    "decode_picked",
    "decode_video",
    "decodes_by_frames",
    "find_frames",
    "is_turned",
    "probe_audio",
    "probe_image",
    "probe_video",
    "read_lmdb",
    "resample_audio",
    "to_rgb",
]
