"""Labels from ids alone: find the tokens that open an answer, label up to the next stop token.

Enters: padded ids [B, S], the conversations behind them, the processor. Leaves: labels [B, S]. For callers that have no
rendered text; `labels.py` is exact where there is one. Markers are searched for with array operations, and those that
a text holds literally are counted out with the help of the conversations, so that a typed marker opens no answer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from vlm_stream.encode.chat_format import chat_format, tokenizer_of
from vlm_stream.encode.labels import IGNORE
from vlm_stream.encode.text_search import build_labels, message_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

__all__ = ["IMSTART_PROCESSORS", "AnswerMarker", "build_labels_from_template", "find_marker", "scan_markers"]

logger = logging.getLogger(__name__)

IMSTART_PROCESSORS: Final = frozenset(
    {
        "Qwen2VLProcessor",
        "Qwen2_5_VLProcessor",
        "Qwen2_5OmniProcessor",
        "Qwen3VLProcessor",
        "Qwen3VLMoeProcessor",
        "Qwen3OmniMoeProcessor",
    }
)
"""Processors whose answers open with `<|im_start|>assistant` and a newline."""


@dataclass(frozen=True, slots=True)
class AnswerMarker:
    """The tokens around an answer."""

    ids: tuple[int, ...]
    """What opens it."""
    text: str
    """The same as text."""
    stop_id: int
    """What ends it."""
    stop_text: str


_cache: WeakKeyDictionary[Any, tuple[str, AnswerMarker | None]] = WeakKeyDictionary()


def build_labels_from_template(
    input_ids_batch: torch.Tensor, conversations: Sequence[Sequence[dict[str, Any]]], processor: Any
) -> torch.Tensor:
    """Return labels [B, S]: each answer with its stop token, IGNORE elsewhere.

    The markers are those of the processor's family, or those that its chat template writes; a processor with neither
    falls back to searching for the answers' text.
    """
    marker = find_marker(processor)
    if marker is None:
        return build_labels(input_ids_batch, conversations, processor)
    import torch

    tokenizer = tokenizer_of(processor)
    rows = [
        scan_markers(row, marker, tokenizer, conversation)
        for row, conversation in zip(input_ids_batch.cpu().numpy(), conversations, strict=True)
    ]
    return torch.from_numpy(np.stack(rows)).to(input_ids_batch.device)


def find_marker(processor: Any) -> AnswerMarker | None:
    """Return the markers of a processor, found once; None (and one warning) when there are none to be found."""
    key = str(getattr(processor, "chat_template", None) or getattr(tokenizer_of(processor), "chat_template", None))
    known = _cache.get(processor)
    if known is None or known[0] != key:
        known = (key, _find(processor))
        _cache[processor] = known
        if known[1] is None:
            logger.warning(
                "No markers around answers were found for %s: labels come from searching for the answers' text.",
                type(processor).__name__,
            )
    return known[1]


def _find(processor: Any) -> AnswerMarker | None:
    tokenizer, name = tokenizer_of(processor), type(processor).__name__
    if name == "InklingProcessor":
        marker = _marker(tokenizer, "<|message_model|><|content_text|>", "<|content_model_end_sampling|>")
        if marker is not None:
            return marker
    if name in IMSTART_PROCESSORS:
        marker = _marker(tokenizer, "<|im_start|>assistant\n", "<|im_end|>")
        if marker is not None:
            return marker
    chat = chat_format(processor)
    stops = [token for token, index in chat.chat_ids.items() if index in chat.stop_ids and token in chat.closing]
    if not chat.header or not stops:
        return None
    return _marker(tokenizer, chat.header, min(stops, key=chat.closing.find))


def _marker(tokenizer: Any, text: str, stop: str) -> AnswerMarker | None:
    stop_id = tokenizer.convert_tokens_to_ids(stop)
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    unk = getattr(tokenizer, "unk_token_id", None)
    is_known = isinstance(stop_id, int) and stop_id != unk and ids and unk not in ids
    first_token = text[: text.find(">") + 1]
    is_whole = not first_token or tokenizer.convert_tokens_to_ids(first_token) == ids[0]
    return AnswerMarker(ids, text, stop_id, stop) if is_known and is_whole else None


def scan_markers(
    ids: npt.NDArray[np.int64],
    marker: AnswerMarker,
    tokenizer: Any,
    conversation: Sequence[dict[str, Any]] | None = None,
) -> npt.NDArray[np.int64]:
    """Return labels [S]; an answer runs from its marker up to and with the next stop token, or to the end."""
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    begins = _marker_ends(ids, marker, tokenizer)
    stops = np.flatnonzero(ids == marker.stop_id)
    typed = _typed_counts(conversation, marker) if conversation is not None else []
    answers = _real_answers(len(begins), typed)
    for begin, typed_stops in ((begins[i], stops_inside) for i, stops_inside in answers):
        nth = int(np.searchsorted(stops, begin)) + typed_stops
        end = int(stops[nth]) + 1 if nth < len(stops) else len(ids)
        labels[begin:end] = ids[begin:end]
    return labels


def _marker_ends(ids: npt.NDArray[np.int64], marker: AnswerMarker, tokenizer: Any) -> list[int]:
    """Return the first token after each marker; a last token of blanks may have merged with the answer's first."""
    wanted = np.asarray(marker.ids, dtype=np.int64)
    last = _decode(tokenizer, int(wanted[-1]))
    solid = wanted[:-1] if len(wanted) > 1 and not last.strip() else wanted
    if len(ids) < len(solid):
        return []
    places = np.flatnonzero(ids[: len(ids) - len(solid) + 1] == solid[0])
    for offset in range(1, len(solid)):
        places = places[ids[places + offset] == solid[offset]]
    ends = places + len(solid)
    if len(solid) == len(wanted):
        return [int(end) for end in ends]
    found = []
    for end in (int(end) for end in ends if end < len(ids)):
        if ids[end] == wanted[-1]:
            found.append(end + 1)
        elif _decode(tokenizer, int(ids[end])).startswith(last):
            found.append(end)
    return found


def _typed_counts(conversation: Sequence[dict[str, Any]], marker: AnswerMarker) -> list[tuple[bool, int, int]]:
    """Return per turn: is it an answer, and how many markers and stop tokens its text holds literally."""
    texts = [(message.get("role") == "assistant", message_text(message)) for message in conversation]
    return [(is_answer, text.count(marker.text), text.count(marker.stop_text)) for is_answer, text in texts]


def _real_answers(num_found: int, typed: list[tuple[bool, int, int]]) -> list[tuple[int, int]]:
    """Return which of the found markers the template wrote, each with the stop tokens typed inside its answer."""
    if not any(markers or stops for _, markers, stops in typed):
        return [(index, 0) for index in range(num_found)]
    answers, index = [], 0
    for is_answer, markers, stops in typed:
        if is_answer and index < num_found:
            answers.append((index, stops))
        index += markers + int(is_answer)
    return answers


def _decode(tokenizer: Any, token_id: int) -> str:
    return str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
