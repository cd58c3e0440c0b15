"""Speech with transcripts, for Qwen-Omni models: NeMo Automodel's ASR datasets and collates.

Enters: HF datasets with clips and their texts. Leaves: conversations whose clips are decoded on access, and batches.
Durations are read from the headers of the stored files; what a filter leaves out is counted in the log.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import Subset

from vlm_stream.collate import qwen3_omni_collate_fn
from vlm_stream.conversation import Conversation, Item, map_media
from vlm_stream.encode import message_text
from vlm_stream.errors import BadSampleError, ConfigError, require
from vlm_stream.media import decode_audio, probe_audio, resample_audio
from vlm_stream.sources import HFSource, load_rows

logger = logging.getLogger(__name__)

TARGET_SAMPLING_RATE: Final = 16_000
"""Samples a second to which clips are brought."""
DEFAULT_USER_PROMPT: Final = "Write down what is said in this English recording, word for word and nothing else."
"""What the user asks of a clip, unless it is given."""
_TAG: Final = re.compile(r"<[^>]*>")
_NO_WORD: Final = re.compile(r"[^\w\s']|_")


@dataclass(frozen=True)
class Source:
    """One corpus of a mix."""

    name: str
    """What the mix calls it."""
    repo: str
    """Hub id or folder."""
    config: str | None
    """Of the dataset, where it has several."""
    split: str
    text_col: str
    """Column of the transcripts."""
    limit: int | None = None
    """Take only the first rows."""
    trust_remote_code: bool = False
    """Let the dataset bring its own code, where the installed `datasets` still runs any."""
    known_count: int | None = None
    """How many rows it is known to have; nothing depends on it."""


SOURCES: Final = (
    Source("ami_ihm", "edinburghcstr/ami", "ihm", "train", "text", known_count=108_502),
    Source("earnings22", "sanchit-gandhi/earnings22_split", None, "train", "sentence", known_count=52_006),
    Source("voxpopuli_en", "facebook/voxpopuli", "en", "train", "normalized_text", 4_000, known_count=4_000),
    Source("gigaspeech_s", "speechcolab/gigaspeech", "s", "train", "text", known_count=230_068),
    Source("spgispeech_s", "kensho/spgispeech", "S", "train", "transcript", known_count=77_073),
    Source("librispeech", "openslr/librispeech_asr", "clean", "train.100", "text", known_count=28_539),
)
"""The corpora of `make_multi_en_asr_dataset`; for gigaspeech and spgispeech terms must be accepted on the hub."""


def make_hf_audio_asr_dataset(
    path_or_dataset: Any,
    split: str = "train",
    name: str | None = None,
    sampling_rate: int = TARGET_SAMPLING_RATE,
    system_prompt: str | None = None,
    user_prompt: str | None = None,
    audio_column: str = "audio",
    text_column: str = "text",
    drop_empty_text: bool = True,
    min_audio_duration_seconds: float | None = None,
    max_audio_duration_seconds: float | None = None,
    **load_kwargs: Any,
) -> HFSource:
    """Return clips with transcripts of any HF dataset, decoded on access.

    Args:
        path_or_dataset: Hub id, folder, `Dataset` or list of dicts.
        split: Which split.
        name: Which configuration of the dataset.
        sampling_rate: Of the clips as they leave.
        system_prompt: A system turn; blank or None: no such turn.
        user_prompt: Text before the clip; blank or None: the clip alone.
        audio_column: Column of the clips.
        text_column: Column of the transcripts.
        drop_empty_text: Leave rows without text out; otherwise such a row is an error when it is asked for.
        min_audio_duration_seconds: Leave shorter clips out.
        max_audio_duration_seconds: Leave longer clips out.
        **load_kwargs: Further arguments of `datasets.load_dataset`.

    Returns:
        `{"conversation": [...]}` by number; a source that `make_shards` takes too.
    """
    rows = _load(path_or_dataset, split, name, (audio_column, text_column), load_kwargs)
    kept = np.arange(len(rows))
    if drop_empty_text:
        kept = _with_text("asr", [bool((text or "").strip()) for text in _column(rows, text_column)])
    kept = _in_time(rows, kept, audio_column, min_audio_duration_seconds, max_audio_duration_seconds)
    chosen = Subset(rows, kept.tolist())
    return _source(chosen, "asr", sampling_rate, system_prompt, user_prompt, audio_column, text_column)


def make_multi_en_asr_dataset(
    *,
    sampling_rate: int = TARGET_SAMPLING_RATE,
    system_prompt: str | None = None,
    user_prompt: str | None = DEFAULT_USER_PROMPT,
    min_audio_duration_seconds: float | None = 1.0,
    max_audio_duration_seconds: float | None = 30.0,
    shuffle_seed: int | None = 42,
    sources: Sequence[Source | Mapping[str, Any]] | None = None,
    audio_column: str = "audio",
    text_column: str = "text",
) -> HFSource:
    """Return conversations of `build_multi_en_source_mix`; arguments as there and for `make_hf_audio_asr_dataset`."""
    mix = build_multi_en_source_mix(
        sources=sources,
        audio_column=audio_column,
        text_column=text_column,
        shuffle_seed=shuffle_seed,
        min_audio_duration_seconds=min_audio_duration_seconds,
        max_audio_duration_seconds=max_audio_duration_seconds,
    )
    return _source(mix, "multi_en_asr", sampling_rate, system_prompt, user_prompt, audio_column, text_column)


def build_multi_en_source_mix(
    *,
    sources: Sequence[Source | Mapping[str, Any]] | None = None,
    audio_column: str = "audio",
    text_column: str = "text",
    shuffle_seed: int | None = 42,
    min_audio_duration_seconds: float | None = 1.0,
    max_audio_duration_seconds: float | None = 30.0,
) -> Sequence[dict[str, Any]]:
    """Return the rows of several corpora as one list of `{audio, text, source}`, texts normalised.

    Args:
        sources: `Source`s, or their fields as mappings; `SOURCES` if None.
        audio_column: Column of the clips, in every corpus and in the mix.
        text_column: Column of the transcripts in the mix.
        shuffle_seed: Of the order; None leaves the corpora one after the other.
        min_audio_duration_seconds: Leave shorter clips out.
        max_audio_duration_seconds: Leave longer clips out.
    """
    parts, places = [], []
    for number, source in enumerate(_as_source(entry) for entry in (SOURCES if sources is None else sources)):
        options = {"trust_remote_code": True} if source.trust_remote_code else {}
        rows = _load(source.repo, source.split, source.config, (audio_column, source.text_col), options)
        texts = _column(rows, source.text_col)[: source.limit]
        kept = _with_text(source.name, [bool(normalize_text(text)) for text in texts])
        parts.append((source, rows))
        places.append(np.stack([np.full(len(kept), number), kept], axis=1))
    order = np.concatenate(places) if places else np.zeros((0, 2), np.int64)
    if shuffle_seed is not None:
        order = order[np.random.default_rng(shuffle_seed).permutation(len(order))]
    mix = _Mix(parts, order, audio_column, text_column)
    bounds = min_audio_duration_seconds, max_audio_duration_seconds
    return _Mix(parts, order[_in_time(mix, np.arange(len(mix)), audio_column, *bounds)], audio_column, text_column)


def normalize_text(text: str | None) -> str:
    """Return upper-case words without tags and punctuation; apostrophes and digits stay.

    >>> normalize_text("It<COMMA> doesn't  matter_much!")
    "IT DOESN'T MATTER MUCH"
    """
    words = _TAG.sub(" ", (text or "").replace("\u2019", "'")).upper()
    return " ".join(_NO_WORD.sub(" ", words).split())


class _Mix(Sequence[Any]):
    """Rows of several corpora in a given order [n, 2]: corpus and row."""

    def __init__(self, parts: Sequence[tuple[Source, Any]], order: npt.NDArray[np.int64], audio: str, text: str):
        self.parts, self.order, self.audio, self.text = tuple(parts), order, audio, text

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Any) -> Any:
        part, row = map(int, self.order[index])
        source, rows = self.parts[part]
        own = rows[row]
        return {
            self.audio: own[self.audio],
            self.text: normalize_text(own[source.text_col]),
            "source": source.name,
        }


def _as_source(given: Any) -> Source:
    given = given.to_dict() if hasattr(given, "to_dict") else given
    if isinstance(given, Source):
        return given
    names = {entry.name for entry in fields(Source)}
    if not isinstance(given, Mapping) or set(given) - names:
        said = f"the keys {sorted(set(given) - names)}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise ConfigError(f"a source of the mix has {said}, which no corpus has; its fields are {sorted(names)}.")
    return Source(**given)


def _load(given: Any, split: str, name: str | None, columns: tuple[str, str], options: Mapping[str, Any]) -> Any:
    if isinstance(given, str) and (name is not None or options):
        datasets = require("datasets", "hf", "Reading HF datasets")
        given = datasets.load_dataset(given, name, split=split, **options)
    return load_rows(given, split, columns)


def _column(rows: Any, name: str) -> Sequence[Any]:
    """Return one column alone: rows of clips are large."""
    if hasattr(rows, "select_columns"):
        column: Sequence[Any] = rows.select_columns([name])[:][name]
        return column
    return [row[name] for row in rows]


def _with_text(name: str, has_text: Sequence[bool]) -> npt.NDArray[np.int64]:
    kept = np.flatnonzero(np.asarray(has_text, bool))
    if len(kept) < len(has_text):
        logger.warning(
            "%s: %d of %d clips have no text and are left out.", name, len(has_text) - len(kept), len(has_text)
        )
    return kept


def _in_time(
    rows: Any, places: npt.NDArray[np.int64], column: str, least: float | None, most: float | None
) -> npt.NDArray[np.int64]:
    """Return the places whose clips last no less and no longer than asked; unreadable ones are left out too."""
    if least is None and most is None:
        return places
    kept, unreadable = [], []
    for place in places.tolist():
        try:
            seconds = _seconds(rows[place][column])
        except (BadSampleError, OSError) as error:
            unreadable.append(f"row {place}: {error}")
            continue
        if (least is None or seconds >= least) and (most is None or seconds <= most):
            kept.append(place)
    if len(kept) < len(places):
        others = len(places) - len(kept) - len(unreadable)
        first = f", such as {unreadable[0]}" if unreadable else ""
        logger.warning(
            "%d of %d clips are left out: %d last less than %s or more than %s seconds, %d cannot be read%s",
            len(places) - len(kept), len(places), others, least, most, len(unreadable), first,
        )  # fmt: skip
    return np.asarray(kept, np.int64)


def _seconds(clip: Any) -> float:
    if isinstance(clip, dict) and clip.get("array") is not None:
        return len(clip["array"]) / float(clip["sampling_rate"])
    info = probe_audio(_stored(clip))
    return info.samples / info.rate


def _stored(clip: Any) -> Any:
    where = (clip.get("bytes") or clip.get("path")) if isinstance(clip, dict) else clip
    if not where:
        raise BadSampleError("convert", "null_media", "the clip has neither bytes nor a path")
    return where


def _source(
    rows: Any, name: str, rate: int, system_prompt: str | None, user_prompt: str | None, audio: str, text: str
) -> HFSource:
    system = {"role": "system", "content": [{"type": "text", "text": system_prompt}]}
    before = [system] if (system_prompt or "").strip() else []
    question = [{"type": "text", "text": user_prompt}] if (user_prompt or "").strip() else []
    convert = partial(_talk, before=before, question=question, audio=audio, text=text)
    return HFSource(rows, name=name, convert=convert, finish=partial(_decoded, rate=rate))


def _talk(
    row: Mapping[str, Any], _: int, before: Conversation, question: list[Item], audio: str, text: str
) -> dict[str, Any]:
    if not (row[text] or "").strip():
        raise BadSampleError("convert", "no_text", f"the transcript in '{text}' is empty, so there is nothing to learn")
    clip = row[audio] if isinstance(row[audio], dict) and "array" in row[audio] else _stored(row[audio])
    user = {"role": "user", "content": [*question, {"type": "audio", "audio": clip}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": row[text]}]}
    return {"conversation": [*before, user, answer]}


def _decoded(example: dict[str, Any], rate: int) -> dict[str, Any]:
    *before, user, answer = example["conversation"]
    *question, item = user["content"]
    clip = item["audio"]
    if isinstance(clip, dict):
        wave = resample_audio(np.asarray(clip["array"], np.float32), int(clip["sampling_rate"]), rate)
    else:
        wave = decode_audio(clip, rate)
    heard = {**user, "content": [*question, {**item, "audio": wave}]}
    system = [{**message, "content": message["content"][0]["text"]} for message in before]
    return {"conversation": [*system, heard, answer]}


def qwen3_omni_asr_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
    """Collate conversations with decoded clips; padded on the right, labels shifted.

    Args:
        examples: `{"conversation": [...]}`; the last turn is the assistant's and has text; clips are 1-D waves at the
            processor's rate.
        processor: That of Qwen3-Omni or Qwen2.5-Omni.

    Raises:
        ValueError: An example has no answer, or a clip is no mono wave.
    """
    heard = []
    for number, example in enumerate(examples):
        conversation = example["conversation"]
        if not conversation or conversation[-1]["role"] != "assistant" or not message_text(conversation[-1]).strip():
            raise ValueError(
                f"example {number} of the batch must end with an assistant turn that has text, or nothing is learned "
                f"from it; leave it out."
            )
        heard.append({**example, "conversation": map_media(conversation, partial(_with_wave, number))})
    return qwen3_omni_collate_fn(heard, processor)


def qwen2_5_omni_asr_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
    """Collate for Qwen2.5-Omni, as `qwen3_omni_asr_collate_fn`."""
    return qwen3_omni_asr_collate_fn(examples, processor)


def _with_wave(number: int, item: Item) -> Item:
    if item["type"] != "audio":
        return item
    given = item["audio"]
    wave = given.detach().cpu().numpy() if hasattr(given, "detach") else given
    if not isinstance(wave, np.ndarray):
        raise ValueError(
            f"the audio of example {number} is a {type(given).__name__}, not a wave; decode it before (an array or "
            f"tensor of mono samples), or use qwen3_omni_collate_fn."
        )
    if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.number):
        raise ValueError(
            f"the audio of example {number} has the shape {list(wave.shape)} and type {wave.dtype}, but the processor "
            f"takes mono waves of numbers; mix its channels to one."
        )
    return {**item, "audio": wave.astype(np.float32, copy=False)}
