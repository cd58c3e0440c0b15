"""Speech datasets of the hub: clips with transcriptions."""

import io
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import require
from vlm_stream.sources.hf_source import HFSource, load_rows, media_item, text_item, turn

_RATE: Final = 16_000
_INSTRUCTION: Final = "Transcribe the Turkish audio clip."
_AUDIO_TOKEN: Final = "<|endoftext11|>"  # noqa: S105


def make_cv17_dataset(
    path_or_dataset: Any = "ysdede/commonvoice_17_tr_fixed",
    split: str = "train",
    *,
    sampling_rate: int = _RATE,
    audio_column: str = "audio",
    text_column: str = "transcription",
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return Turkish clips with transcriptions.

    `source[i]` has plain strings as contents, the user's beginning with the audio token of Phi-4, and
    `audio` = (mono float32 samples, their rate). Records hold the stored clip as an audio item before the text.
    """
    columns = (audio_column, text_column)
    rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
    convert = partial(_cv17, audio=audio_column, text=text_column)
    return HFSource(rows, name="cv17", convert=convert, finish=partial(_with_samples, rate=sampling_rate))


def _cv17(row: Mapping[str, Any], _: int, audio: str, text: str) -> dict[str, Any]:
    user = turn("user", media_item("audio", row[audio]), text_item(_INSTRUCTION))
    return {"conversation": [user, turn("assistant", text_item(row[text]))]}


def _with_samples(example: dict[str, Any], rate: int) -> dict[str, Any]:
    user, assistant = example["conversation"]
    audio, instruction = user["content"]
    return {
        "conversation": [
            {"role": "user", "content": _AUDIO_TOKEN + instruction["text"]},
            {"role": "assistant", "content": assistant["content"][0]["text"]},
        ],
        "audio": (_mono_samples(audio["audio"], rate), rate),
    }


def _mono_samples(where: bytes | str, new_rate: int) -> npt.NDArray[np.float32]:
    soundfile = require("soundfile", "audio", "Decoding audio")
    try:
        samples, rate = soundfile.read(io.BytesIO(where) if isinstance(where, bytes) else where, dtype="float32")
    except soundfile.SoundFileError as error:
        raise ValueError(str(error)) from None
    mono = samples if samples.ndim == 1 else samples.mean(axis=1)
    return resample(mono, int(rate), new_rate)


def resample(samples: npt.NDArray[np.float32], rate: int, new_rate: int) -> npt.NDArray[np.float32]:
    """Return the clip at another rate, as decoding for training resamples it."""
    if rate == new_rate:
        return samples
    soxr = require("soxr", "audio", f"Resampling audio from {rate} to {new_rate} Hz")
    resampled: npt.NDArray[np.float32] = soxr.resample(samples, rate, new_rate)
    return resampled
