"""The sound track of a video file, by PyAV: its length and rate by walking its packets, or its waveform.

Enters: the bytes of one file, or its path, and the container that they are. Leaves: [samples, channels] as many as the
walk counts, from the beginning of the track: what a decoder gives beyond is cut off, what it lacks is silence.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vlm_stream.errors import BadSampleError
from vlm_stream.media.container import check_container

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

_CONTAINERS: Final = frozenset(("mov", "matroska", "avi", "flv", "asf", "mpegts", "mpeg"))
"""Others are sounds that have readers of their own."""


class Track(NamedTuple):
    """What a walk over the packets says."""

    samples: int
    rate: int
    channels: int


def video_container(data: Any, stage: str) -> str:
    """Return FFmpeg's name of the container of a video file; empty for other bytes."""
    try:
        name = check_container(data, stage)
    except BadSampleError as error:
        if error.reason == "outside_reference":
            raise
        return ""
    return name if name in _CONTAINERS else ""


def walk_track(data: Any, container: str) -> Track:
    """Return length, rate and channels of the first sound track; its first packets are decoded for the rate."""
    end, first = 0, None
    with _open(data, container) as (file, stream):
        start = stream.start_time
        for packet in file.demux(stream):
            if not packet.size or packet.pts is None:
                continue
            if first is None:
                first = next(iter(packet.decode()), None)
            start = packet.pts if start is None else start
            end = max(end, packet.pts + (packet.duration or 0))
        if first is None:
            raise ValueError("its sound track holds no samples")
        seconds = (end - start) * Fraction(stream.time_base)
        return Track(max(round(seconds * first.sample_rate), 0), first.sample_rate, first.layout.nb_channels)


def read_track(data: Any, container: str, track: Track, stop: int) -> npt.NDArray[np.float32]:
    """Return the samples [samples, channels] of a track up to one of them."""
    import av
    import numpy as np

    wave = np.zeros((stop, track.channels), np.float32)
    at = 0
    with _open(data, container) as (file, stream):
        resampler = av.AudioResampler(format="fltp")
        for frame in file.decode(stream):
            for part in resampler.resample(frame):
                samples = part.to_ndarray().T[: stop - at]  # [samples, channels]
                wave[at : at + len(samples)] = samples
                at += len(samples)
            if at >= stop:
                break
    return wave


@contextmanager
def _open(data: Any, container: str) -> Iterator[tuple[Any, Any]]:
    import av

    source = str(Path(data).absolute()) if isinstance(data, (str, Path)) else io.BytesIO(data)
    with av.open(source, format=container, options={"protocol_whitelist": "file"}) as file:
        if not file.streams.audio:
            raise ValueError("the file has no sound track")
        stream = file.streams.audio[0]
        yield file, stream
