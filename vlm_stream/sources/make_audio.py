"""Datasets of speech with its transcription: CommonVoice 17."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import MissingExtraError
from vlm_stream.sources.hf_rows import load_rows
from vlm_stream.sources.hf_source import HFSource, media_item, text_item, turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

__all__ = ["make_cv17_dataset"]

_RATE: Final = 16_000
_INSTRUCTION: Final = "Transcribe the Turkish audio clip."
_AUDIO_TOKEN: Final = "<|endoftext11|>"  # noqa: S105


def make_cv17_dataset(
    path_or_dataset: Any = "ysdede/commonvoice_17_tr_fixed",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return Turkish clips with transcriptions (columns `audio`, `transcription`).

    `source[i]` has plain strings as contents, the user's beginning with the audio token of Phi-4, and
    `audio` = (mono float32 samples at 16 kHz, 16000). Records hold the stored clip as an audio item before the text.
    """
    columns = ("audio", "transcription")
    rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="cv17", convert=_cv17, finish=_with_samples)


def _cv17(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    user = turn("user", media_item("audio", row["audio"]), text_item(_INSTRUCTION))
    return {"conversation": [user, turn("assistant", text_item(row["transcription"]))]}


def _with_samples(example: dict[str, Any]) -> dict[str, Any]:
    user, assistant = example["conversation"]
    audio, instruction = user["content"]
    return {
        "conversation": [
            {"role": "user", "content": _AUDIO_TOKEN + instruction["text"]},
            {"role": "assistant", "content": assistant["content"][0]["text"]},
        ],
        "audio": (_mono_samples(audio["audio"]), _RATE),
    }


def _mono_samples(where: bytes | str) -> npt.NDArray[np.float32]:
    try:
        import soundfile
    except ImportError:
        raise MissingExtraError("soundfile", "audio", "Decoding audio") from None
    try:
        samples, rate = soundfile.read(io.BytesIO(where) if isinstance(where, bytes) else where, dtype="float32")
    except soundfile.SoundFileError as error:
        raise ValueError(str(error)) from None
    mono = samples if samples.ndim == 1 else samples.mean(axis=1)
    return resample(mono, int(rate), _RATE)


def resample(samples: npt.NDArray[np.float32], rate: int, new_rate: int) -> npt.NDArray[np.float32]:
    """Return [n * new_rate / rate] samples: the spectrum is cut or padded, so tones that both rates can hold stay."""
    import numpy as np

    if rate == new_rate or not len(samples):
        return samples.astype(np.float32)
    num_samples = round(len(samples) * new_rate / rate)
    spectrum = np.fft.rfft(samples.astype(np.float64))
    return (np.fft.irfft(_fit(spectrum, num_samples // 2 + 1), num_samples) * (new_rate / rate)).astype(np.float32)


def _fit(spectrum: npt.NDArray[np.complex128], size: int) -> npt.NDArray[np.complex128]:
    import numpy as np

    fitted = np.zeros(size, np.complex128)
    kept = min(size, len(spectrum))
    fitted[:kept] = spectrum[:kept]
    return fitted
