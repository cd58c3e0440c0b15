"""Media: bytes of images, videos and audio become what a processor takes.

Enters: the bytes of one file (or a path, at conversion). Leaves: PIL images in RGB, frames with the true facts of their
video, mono waveforms; or, by `probe_*`, only what the header says. Must not be known here: processors, conversations,
tar files, and which frames of a video a model wants (a function comes in from outside).

Files: `image.py`, `video.py`, `audio.py`, `lmdb.py`.
"""

from __future__ import annotations

from vlm_stream.media.audio import AudioInfo, decode_audio, probe_audio, resample_audio
from vlm_stream.media.image import ImageConfig, decode_image, is_turned, probe_image, to_rgb
from vlm_stream.media.lmdb import LMDB_SEPARATOR, read_lmdb
from vlm_stream.media.video import DecodedVideo, VideoBackend, VideoInfo, decode_frame_list, decode_video, probe_video

__all__ = [
    "LMDB_SEPARATOR",
    "AudioInfo",
    "DecodedVideo",
    "ImageConfig",
    "VideoBackend",
    "VideoInfo",
    "decode_audio",
    "decode_frame_list",
    "decode_image",
    "decode_video",
    "is_turned",
    "probe_audio",
    "probe_image",
    "probe_video",
    "read_lmdb",
    "resample_audio",
    "to_rgb",
]
