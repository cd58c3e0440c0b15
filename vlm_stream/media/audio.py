"""Audio: wav, flac, ogg or mp3 bytes, or the sound track of a video, to mono float32 at a given rate, or its length.

Enters: the bytes of one file, or its path. Leaves: a waveform that feature extractors take. Decoding is soundfile's
and resampling is soxr's, both in the extra `audio`. Sound tracks of videos are decoded by PyAV; they have as many
samples as a walk over their packets counts: what a decoder gives beyond is cut off, what it lacks is silence.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from vlm_stream.clips import open_file
from vlm_stream.errors import BadSampleError, MissingExtraError, VlmStreamError, blame_sample
from vlm_stream.media.container import check_container
from vlm_stream.media.limits import DEFAULT_LIMITS, MediaLimits
from vlm_stream.media.seconds import find_samples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    import numpy.typing as npt

    from vlm_stream.conversation import Seconds

    Wave = npt.NDArray[np.float32]

_START_BYTES: Final = 12
_MOST_TAGS: Final = 4
"""Of ID3, before the sound."""
_EXACT: Final = ("PCM", "FLOAT", "DOUBLE")
_WITH_TRACKS: Final = frozenset(("mov", "matroska", "avi", "flv", "asf", "mpegts", "mpeg"))
"""Containers of videos; others are sounds that have readers of their own."""
AudioData: TypeAlias = "bytes | bytearray | memoryview | str | Path"


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """What the header of an audio file says."""

    samples: int
    """Samples of one channel."""
    rate: int
    """Samples per second."""


class _Track(NamedTuple):
    samples: int
    rate: int
    channels: int


def probe_audio(data: AudioData, limits: MediaLimits = DEFAULT_LIMITS, *, seconds: Seconds | None = None) -> AudioInfo:
    """Return length (or that of a part) and rate by the header alone; raise `BadSampleError` when there is none."""
    container = _video_container(data, "convert")
    try:
        track = _walk_track(data, container) if container else _header(data)
    except VlmStreamError:
        raise
    except Exception as error:  # its own, the system's, and what numbers in a damaged header lead to
        raise blame_sample(error, "convert", "bad_audio", "The bytes are not audio") from error
    samples, rate = track.samples, track.rate
    if not samples:
        raise BadSampleError("convert", "bad_audio", "The audio file holds no samples.")
    if seconds is not None:
        start, stop = find_samples(samples, rate, seconds)
        samples = stop - start
    limits.check_audio("convert", samples, rate, track.channels)
    return AudioInfo(samples=samples, rate=rate)


def _header(data: AudioData) -> _Track:
    info = _soundfile().info(_source(data, "convert"))
    return _Track(int(info.frames), int(info.samplerate), int(info.channels))


def decode_audio(
    data: AudioData, rate: int, limits: MediaLimits = DEFAULT_LIMITS, *, seconds: Seconds | None = None
) -> Wave:
    """Return the waveform [samples] of a sound or of a part of it, channels averaged, resampled to `rate`."""
    container = _video_container(data, "decode")
    try:
        if container:
            own_rate, wave = _read_track(data, container, limits, seconds)
        else:
            own_rate, wave = _read_file(data, limits, seconds)
    except VlmStreamError:
        raise
    except Exception as error:  # its own, the system's, and what numbers in a damaged header lead to
        raise blame_sample(error, "decode", "bad_audio", "The audio cannot be decoded") from error
    if not len(wave):
        raise BadSampleError("decode", "bad_audio", "The audio file holds no samples.")
    mono: Wave = wave[:, 0] if wave.shape[1] == 1 else wave.mean(axis=1, dtype="float32")
    return resample_audio(mono, int(own_rate), rate)


def _read_file(data: AudioData, limits: MediaLimits, seconds: Seconds | None) -> tuple[int, Wave]:
    """Return the rate of a file of sound, and its samples [samples, channels] or those of a part."""
    with _soundfile().SoundFile(_source(data, "decode")) as file:
        start, stop = (0, file.frames) if seconds is None else find_samples(file.frames, file.samplerate, seconds)
        # Behind a seek, what was compressed with loss begins with other samples.
        begin = start if file.subtype.startswith(_EXACT) else 0
        limits.check_audio("decode", stop - begin, file.samplerate, file.channels)
        file.seek(begin)
        return file.samplerate, file.read(stop - begin, dtype="float32", always_2d=True)[start - begin :]


def _read_track(data: AudioData, container: str, limits: MediaLimits, seconds: Seconds | None) -> tuple[int, Wave]:
    """Return the rate of the sound track of a video, and its samples [samples, channels] or those of a part."""
    import av

    track = _walk_track(data, container)
    start, stop = (0, track.samples) if seconds is None else find_samples(track.samples, track.rate, seconds)
    limits.check_audio("decode", stop, track.rate, track.channels)
    wave = np.zeros((stop, track.channels), np.float32)
    at = 0
    with _open_track(data, container) as (file, stream):
        resampler = av.AudioResampler(format="fltp")
        for frame in file.decode(stream):
            for part in resampler.resample(frame):
                samples = part.to_ndarray().T[: stop - at]  # [samples, channels]
                wave[at : at + len(samples)] = samples
                at += len(samples)
            if at >= stop:
                break
    return track.rate, wave[start:]


def _walk_track(data: AudioData, container: str) -> _Track:
    """Return length, rate and channels of the first sound track; its first packets are decoded for the rate."""
    end, first = 0, None
    with _open_track(data, container) as (file, stream):
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
        return _Track(max(round(seconds * first.sample_rate), 0), first.sample_rate, first.layout.nb_channels)


@contextmanager
def _open_track(data: AudioData, container: str) -> Iterator[tuple[Any, Any]]:
    with open_file(data, container) as file:
        if not file.streams.audio:
            raise ValueError("the file has no sound track")
        yield file, file.streams.audio[0]


def _video_container(data: AudioData, stage: str) -> str:
    """Return FFmpeg's name of the container of a video file; empty for other bytes."""
    try:
        name = check_container(data, stage)
    except BadSampleError as error:
        if error.reason == "outside_reference":
            raise
        return ""
    return name if name in _WITH_TRACKS else ""


def resample_audio(mono: Wave, own_rate: int, rate: int) -> Wave:
    """Return the waveform at another rate."""
    if own_rate == rate:
        return mono
    try:
        soxr = import_module("soxr")
    except ImportError as error:
        raise MissingExtraError("soxr", "audio", f"Resampling audio from {own_rate} to {rate} Hz") from error
    resampled: Wave = soxr.resample(mono, own_rate, rate)
    return resampled


def _source(data: AudioData, stage: str) -> Any:
    """Return what soundfile opens, if it is of a format that is read here: libsndfile knows many more."""
    is_held = isinstance(data, (bytes, bytearray, memoryview))
    with io.BytesIO(data) if is_held else Path(data).open("rb") as file:  # type: ignore[arg-type]
        start, begin = file.read(_START_BYTES), 0
        for _ in range(_MOST_TAGS):
            if start[:3] != b"ID3" or len(start) < _START_BYTES:
                break
            sizes = zip(start[6:10], (21, 14, 7, 0), strict=True)
            begin += 10 + sum((byte & 0x7F) << shift for byte, shift in sizes) + (10 if start[5] & 0x10 else 0)
            file.seek(begin)
            start = file.read(_START_BYTES)
    if not _is_known(start):
        raise BadSampleError(
            stage,
            "bad_audio",
            f"The bytes are not WAV, FLAC, Ogg or MP3: they begin with {start[:8]!r}. Write the file as one of these.",
        )
    return io.BytesIO(data) if is_held else data  # type: ignore[arg-type]


def _is_known(start: bytes) -> bool:
    is_wave = start[:4] in (b"RIFF", b"RF64", b"RIFX") and start[8:12] == b"WAVE"
    # Eleven bits of a frame of MPEG audio, and a layer.
    is_mpeg = len(start) > 1 and start[0] == 0xFF and start[1] >= 0xE0 and bool(start[1] & 0x06)
    return is_wave or is_mpeg or start[:4] in (b"fLaC", b"OggS")


def _soundfile() -> ModuleType:
    try:
        return import_module("soundfile")
    except ImportError as error:
        raise MissingExtraError("soundfile", "audio", "Reading audio") from error
