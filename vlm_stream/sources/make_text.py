"""HF datasets without images: text (Tulu-3, Magicoder) and speech with its transcription (CommonVoice 17)."""

from __future__ import annotations

import io
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import MissingExtraError, SourceError
from vlm_stream.sources.form import ShareGptForm
from vlm_stream.sources.hf_source import HFSource, MixedSource, Rows, interleave, load_rows, media_item, text_item, turn
from vlm_stream.sources.sharegpt import convert_example

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

__all__ = ["make_cv17_dataset", "make_tulu3_dataset", "make_tulu3_magicoder_text_mix_dataset"]

_LOG = logging.getLogger(__name__)
_TULU = "allenai/tulu-3-sft-mixture"
_MAGICODER = "ise-uiuc/Magicoder-OSS-Instruct-75K"
_RATE: Final = 16_000
_INSTRUCTION: Final = "Transcribe the Turkish audio clip."
_AUDIO_TOKEN: Final = "<|endoftext11|>"  # noqa: S105


def make_tulu3_dataset(
    path_or_dataset: Any = _TULU,
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    max_turns: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return instruction dialogues (column `messages`); those of more than `max_turns` messages are left out."""
    rows = load_rows(path_or_dataset, split, ("messages",), ignored=tuple(kwargs))
    if max_turns is not None:
        rows = _up_to_turns(rows, max_turns)
    if limit_dataset_samples is not None:
        rows = load_rows(rows, split, ("messages",), limit=limit_dataset_samples)
    return HFSource(rows, name="tulu3", convert=_tulu)


def make_tulu3_magicoder_text_mix_dataset(
    path_or_dataset: Any = _TULU,
    magicoder_path_or_dataset: Any = _MAGICODER,
    split: str = "train",
    *,
    tulu_split: str | None = None,
    magicoder_split: str | None = None,
    probabilities: Sequence[float] = (0.8, 0.2),
    seed: int = 42,
    max_turns: int = 16,
    limit_total: int | None = None,
    **kwargs: Any,
) -> MixedSource:
    """Return Tulu-3 dialogues and Magicoder problems, drawn 80 to 20 until both were seen whole.

    Args:
        path_or_dataset: Tulu-3 (column `messages`).
        magicoder_path_or_dataset: Magicoder (columns `problem`, `solution`).
        split: Of both, unless one has a split of its own.
        tulu_split: Of Tulu-3.
        magicoder_split: Of Magicoder.
        probabilities: How often each is drawn.
        seed: Of the draw.
        max_turns: Dialogues of more messages are left out.
        limit_total: No more examples than this, both together.
        **kwargs: Options that mean nothing here; they are named in the log.
    """
    tulu = make_tulu3_dataset(path_or_dataset, tulu_split or split, max_turns=max_turns, **kwargs)
    code = HFSource(
        load_rows(magicoder_path_or_dataset, magicoder_split or split, ("problem", "solution")),
        name="magicoder",
        convert=_magicoder,
    )
    for source in (tulu, code):
        if not len(source):
            raise SourceError(f"'{source.name}' has no rows (left), so there is nothing to mix; leave it out.")
    if len(probabilities) != 2 or min(probabilities) <= 0 or abs(sum(probabilities) - 1) > 1e-6:
        raise SourceError(
            f"probabilities {tuple(probabilities)} are no mixture of two; give two above 0 that add up to 1."
        )
    order = interleave([len(tulu), len(code)], probabilities, seed)
    return MixedSource((tulu, code), order[:limit_total], name="tulu3_magicoder")


def _tulu(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    return convert_example({"messages": row["messages"]}, ShareGptForm(), "drop")


def _magicoder(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    return {"conversation": [turn("user", text_item(row["problem"])), turn("assistant", text_item(row["solution"]))]}


def _up_to_turns(rows: Any, max_turns: int) -> Rows:
    """Return the rows with no more than so many messages; how many went is logged."""
    if hasattr(rows, "select_columns"):
        batches = rows.select_columns(["messages"]).with_format("arrow").iter(batch_size=10_000)
        lengths = np.concatenate([_list_lengths(batch["messages"]) for batch in batches] or [np.zeros(0, np.int64)])
    else:
        lengths = np.array([len(row["messages"] or ()) for row in rows], np.int64)
    kept = np.flatnonzero(lengths <= max_turns)
    if len(kept) < len(rows):
        _LOG.warning(
            "tulu3: %d of %d dialogues have more than %d turns and are left out.",
            len(rows) - len(kept), len(rows), max_turns,
        )  # fmt: skip
    selected: Rows = rows.select(kept) if hasattr(rows, "select") else [rows[i] for i in kept.tolist()]
    return selected


def _list_lengths(column: Any) -> Any:
    import pyarrow.compute as pc

    return pc.fill_null(pc.list_value_length(column), 0).to_numpy()


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
    try:
        import soundfile
    except ImportError:
        raise MissingExtraError("soundfile", "audio", "Decoding audio") from None
    try:
        samples, rate = soundfile.read(io.BytesIO(where) if isinstance(where, bytes) else where, dtype="float32")
    except soundfile.SoundFileError as error:
        raise ValueError(str(error)) from None
    mono = samples if samples.ndim == 1 else samples.mean(axis=1)
    return resample(mono, int(rate), new_rate)


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
