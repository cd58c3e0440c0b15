"""Audio: wav, flac, ogg or mp3 bytes to mono float32 at a given rate, or only its length and rate.

Enters: the bytes of one file, or its path. Leaves: a waveform that feature extractors take. Decoding is soundfile's
and resampling is soxr's, both in the extra `audio`.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from vlm_stream.errors import BadSampleError, MissingExtraError, blame_sample

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    import numpy as np
    import numpy.typing as npt

__all__ = ["AudioInfo", "decode_audio", "probe_audio"]

AudioData: TypeAlias = "bytes | bytearray | memoryview | str | Path"


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """What the header of an audio file says."""

    samples: int
    """Samples of one channel."""
    rate: int
    """Samples per second."""


def probe_audio(data: AudioData) -> AudioInfo:
    """Return length and rate from the header alone; raise `BadSampleError` when there is none."""
    soundfile = _soundfile()
    try:
        info = soundfile.info(_source(data))
    except Exception as error:  # its own, the system's, and what numbers in a damaged header lead to
        raise blame_sample(error, "convert", "bad_audio", "The bytes are not audio") from error
    if not info.frames:
        raise BadSampleError("convert", "bad_audio", "The audio file holds no samples.")
    return AudioInfo(samples=int(info.frames), rate=int(info.samplerate))


def decode_audio(data: AudioData, rate: int) -> npt.NDArray[np.float32]:
    """Return the waveform [samples], channels averaged, resampled to `rate`."""
    soundfile = _soundfile()
    try:
        wave, own_rate = soundfile.read(_source(data), dtype="float32", always_2d=True)  # [samples, channels]
    except Exception as error:  # its own, the system's, and what numbers in a damaged header lead to
        raise blame_sample(error, "decode", "bad_audio", "The audio cannot be decoded") from error
    if not len(wave):
        raise BadSampleError("decode", "bad_audio", "The audio file holds no samples.")
    mono: npt.NDArray[np.float32] = wave[:, 0] if wave.shape[1] == 1 else wave.mean(axis=1, dtype="float32")
    return mono if own_rate == rate else resample_audio(mono, int(own_rate), rate)


def resample_audio(mono: npt.NDArray[np.float32], own_rate: int, rate: int) -> npt.NDArray[np.float32]:
    """Return the waveform at another rate."""
    if own_rate == rate:
        return mono
    try:
        soxr = import_module("soxr")
    except ImportError as error:
        raise MissingExtraError("soxr", "audio", f"Resampling audio from {own_rate} to {rate} Hz") from error
    resampled: npt.NDArray[np.float32] = soxr.resample(mono, own_rate, rate)
    return resampled


def _source(data: AudioData) -> Any:
    return io.BytesIO(data) if isinstance(data, (bytes, bytearray, memoryview)) else data


def _soundfile() -> ModuleType:
    try:
        return import_module("soundfile")
    except ImportError as error:
        raise MissingExtraError("soundfile", "audio", "Reading audio") from error
