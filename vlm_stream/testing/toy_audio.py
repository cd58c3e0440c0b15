"""Seeded sound as bytes: enter seconds and a rate, leaves a WAV file's content."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["make_wav"]


def make_toy_wave(num_samples: int, rate: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return [num_samples] values between -1 and 1: three tones that swell and fade."""
    rng = np.random.default_rng(seed)
    seconds = np.arange(num_samples) / rate
    tones = [np.sin(2 * np.pi * pitch * seconds + phase) for pitch, phase in rng.uniform(1, 1000, (3, 2))]
    swell = 0.5 - 0.5 * np.cos(2 * np.pi * seconds)
    sound: npt.NDArray[np.float32] = (np.mean(tones, axis=0) * swell * 0.8).astype(np.float32)
    return sound


def make_wav(seconds: float, *, rate: int = 16000, channels: int = 1, seed: int = 0) -> bytes:
    """Return a WAV file of 16-bit samples.

    >>> make_wav(0.5)[:4]
    b'RIFF'
    """
    num_samples = round(seconds * rate)
    lanes = [make_toy_wave(num_samples, rate, seed + channel) for channel in range(channels)]
    frames = (np.stack(lanes, axis=1) * 32767).astype("<i2")  # [num_samples, channels]
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(frames.tobytes())
    return buffer.getvalue()
