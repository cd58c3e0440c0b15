"""Audio of any channel count and rate becomes a mono waveform at the asked rate."""

from __future__ import annotations

import importlib
import io

import numpy as np
import pytest
import soundfile

from vlm_stream.errors import BadSampleError, MissingExtraError
from vlm_stream.media import AudioInfo, decode_audio, probe_audio
from vlm_stream.media import audio as audio_module
from vlm_stream.testing import make_wav


def _as_format(kind: str, wave: np.ndarray, rate: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format=kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_formats_decode_to_the_same_tone(kind):
    rate, pitch = 16_000, 440.0
    tone = (0.5 * np.sin(2 * np.pi * pitch * np.arange(rate) / rate)).astype(np.float32)
    data = _as_format(kind, tone, rate)
    wave = decode_audio(data, rate)
    assert wave.dtype == np.float32
    assert wave.ndim == 1
    assert probe_audio(data).rate == rate
    spectrum = np.abs(np.fft.rfft(wave))
    assert np.argmax(spectrum) * rate / len(wave) == pytest.approx(pitch, rel=0.01)


def test_channels_are_averaged():
    stereo = np.stack([np.full(100, 0.5), np.full(100, -0.25)], axis=1).astype(np.float32)
    assert decode_audio(_as_format("FLAC", stereo, 8000), 8000) == pytest.approx(np.full(100, 0.125), abs=1e-4)


@pytest.mark.parametrize(("own", "wanted"), [(44_100, 16_000), (8_000, 16_000)])
def test_resampling_keeps_length_in_seconds_and_pitch(own, wanted):
    tone = (0.5 * np.sin(2 * np.pi * 300 * np.arange(own) / own)).astype(np.float32)
    wave = decode_audio(_as_format("WAV", tone, own), wanted)
    assert abs(len(wave) - wanted) <= 1
    assert np.argmax(np.abs(np.fft.rfft(wave))) == pytest.approx(300, abs=1)


def test_probe_reads_the_header():
    assert probe_audio(make_wav(0.5, rate=22_050, channels=2)) == AudioInfo(samples=11_025, rate=22_050)


@pytest.mark.parametrize("data", [b"", b"no sound here" * 20])
def test_other_bytes_are_a_bad_sample(data):
    with pytest.raises(BadSampleError, match="are not WAV, FLAC, Ogg or MP3") as caught:
        decode_audio(data, 16_000)
    assert (caught.value.stage, caught.value.reason) == ("decode", "bad_audio")
    with pytest.raises(BadSampleError, match="are not WAV, FLAC, Ogg or MP3") as caught:
        probe_audio(data)
    assert caught.value.stage == "convert"


def test_no_samples_is_a_bad_sample():
    silent = _as_format("WAV", np.zeros(0, dtype=np.float32), 8000)
    with pytest.raises(BadSampleError, match="holds no samples"):
        decode_audio(silent, 8000)
    with pytest.raises(BadSampleError, match="holds no samples"):
        probe_audio(silent)


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_missing_package_names_the_extra(monkeypatch, package):
    def without(name):
        if name == package:
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr(audio_module, "import_module", without)
    with pytest.raises(MissingExtraError, match=rf"{package}.*vlm-stream\[audio\]"):
        decode_audio(make_wav(0.1, rate=8000), 16_000)
