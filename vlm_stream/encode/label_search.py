"""Labels from ids alone, for callers that have no rendered text (`labels.py` is exact where there is one).

Enters: padded ids [B, S], their conversations, the processor. Leaves: labels [B, S]. Answers are found between the
tokens that open and end them; a processor without such tokens falls back to searching for the answers' own text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from vlm_stream.encode.chat_format import STOP_TOKENS, chat_format, per_template
from vlm_stream.encode.control_tokens import find_ids, find_text, placeholder_ids
from vlm_stream.keys import IGNORE
from vlm_stream.tokens import Processor, tokenizer_of

if TYPE_CHECKING:
    import torch


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

    ids: tuple[int, ...]  # what opens it
    text: str  # the same as text
    stop_id: int  # what ends it
    stop_text: str


def build_labels_from_template(
    input_ids_batch: torch.Tensor, conversations: Sequence[Sequence[dict[str, Any]]], processor: Processor
) -> torch.Tensor:
    """Return labels [B, S]: each answer with its stop token, IGNORE elsewhere.

    The markers are those of the processor's family, or those that its chat template writes.
    """
    marker = find_marker(processor)
    if marker is None:
        return build_labels(input_ids_batch, conversations, processor)
    tokenizer = tokenizer_of(processor)
    rows = [
        scan_markers(row, marker, tokenizer, conversation)
        for row, conversation in zip(input_ids_batch.cpu().numpy(), conversations, strict=True)
    ]
    return _as_labels(np.stack(rows), input_ids_batch, processor)


def build_labels(
    input_ids_batch: torch.Tensor, conversations: Sequence[Sequence[dict[str, Any]]], processor: Processor
) -> torch.Tensor:
    """Return labels [B, S]: the tokens of each assistant text and the stop token after it, IGNORE elsewhere.

    All turns are searched for in their order, so that a user's repetition of an answer is not taken for it. A turn that
    is not found is reported and does not silence the ones after it.
    """
    tokenizer = tokenizer_of(processor)
    stops = {*STOP_TOKENS, getattr(tokenizer, "eos_token", None)} - {None}
    labels = np.full(tuple(input_ids_batch.shape), IGNORE, dtype=np.int64)
    rows = input_ids_batch.cpu().numpy()
    for ids, row_labels, conversation in zip(rows, labels, conversations, strict=True):
        cursor = 0
        for message in conversation:
            text = message_text(message)
            is_answer = message.get("role") == "assistant"
            found = find_text(tokenizer, (text, text.lstrip()), ids, cursor) if text else None
            if found is None:
                if text and is_answer:
                    logger.warning("An answer was not found in its ids and stays unlabelled: %.60r", text)
                continue
            begin, end = found
            if is_answer and message.get("train", True):
                if end < len(ids) and _decode_one(tokenizer, int(ids[end])).strip() in stops:
                    end += 1
                row_labels[begin:end] = ids[begin:end]
            cursor = end
    return _as_labels(labels, input_ids_batch, processor)


def _as_labels(labels: npt.NDArray[np.int64], input_ids: torch.Tensor, processor: Processor) -> torch.Tensor:
    """Return the labels as a tensor beside the ids; placeholders of media are never labels."""
    import torch

    for placeholder in placeholder_ids(processor):
        labels[labels == placeholder] = IGNORE
    return torch.from_numpy(labels).to(input_ids.device)


def message_text(message: dict[str, Any]) -> str:
    """Return the text of a turn, without its media."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    items = content if isinstance(content, list) else []
    return "".join(str(i.get("text") or "") for i in items if isinstance(i, dict) and i.get("type", "text") == "text")


def _decode_one(tokenizer: Any, token_id: int) -> str:
    """Return a token's text from tokenizers that take an id, and from those that take only lists of them."""
    try:
        return str(tokenizer.decode(token_id))
    except Exception:  # a tokenizer that takes only lists raises what it likes
        return str(tokenizer.decode([token_id]))


@per_template
def find_marker(processor: Processor) -> AnswerMarker | None:
    """Return the markers of a processor; None (and one warning) when there are none to be found."""
    tokenizer, name = tokenizer_of(processor), type(processor).__name__
    marker = None
    if name == "InklingProcessor":
        marker = _marker(tokenizer, "<|message_model|><|content_text|>", "<|content_model_end_sampling|>")
    elif name in IMSTART_PROCESSORS:
        marker = _marker(tokenizer, "<|im_start|>assistant\n", "<|im_end|>")
    if marker is None:
        chat = chat_format(processor)
        stops = [token for token, index in chat.chat_ids.items() if index in chat.stop_ids and token in chat.closing]
        if chat.header and stops:
            marker = _marker(tokenizer, chat.header, min(stops, key=chat.closing.find))
    if marker is None:
        logger.warning(
            "No markers around answers were found for %s: labels come from searching for the answers' text.", name
        )
    return marker


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
    """Return labels [S]; an answer runs from its marker up to and with the next stop token, or to the end.

    Markers that a text of the conversation holds literally are counted out, so that a typed marker opens no answer.
    """
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    begins = _marker_ends(ids, marker, tokenizer)
    stops = np.flatnonzero(ids == marker.stop_id)
    for index, typed_stops in _real_answers(len(begins), marker, conversation or ()):
        begin = begins[index]
        nth = int(np.searchsorted(stops, begin)) + typed_stops
        end = int(stops[nth]) + 1 if nth < len(stops) else len(ids)
        labels[begin:end] = ids[begin:end]
    return labels


def _marker_ends(ids: npt.NDArray[np.int64], marker: AnswerMarker, tokenizer: Any) -> list[int]:
    """Return the first token after each marker; a last token of blanks may have merged with the answer's first."""

    def decode(token_id: int) -> str:
        return str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    wanted = np.asarray(marker.ids, dtype=np.int64)
    last = decode(int(wanted[-1]))
    solid = wanted[:-1] if len(wanted) > 1 and not last.strip() else wanted
    ends = (find_ids(ids, solid) + len(solid)).tolist()
    if len(solid) == len(wanted):
        return list(ends)
    found = []
    for end in (end for end in ends if end < len(ids)):
        if ids[end] == wanted[-1]:
            found.append(end + 1)
        elif decode(int(ids[end])).startswith(last):
            found.append(end)
    return found


def _real_answers(
    num_found: int, marker: AnswerMarker, conversation: Sequence[dict[str, Any]]
) -> list[tuple[int, int]]:
    """Return which of the found markers the template wrote, each with the stop tokens typed inside its answer."""
    texts = [(message.get("role") == "assistant", message_text(message)) for message in conversation]
    typed = [(is_answer, text.count(marker.text), text.count(marker.stop_text)) for is_answer, text in texts]
    if not any(markers or stops for _, markers, stops in typed):
        return [(index, 0) for index in range(num_found)]
    answers, index = [], 0
    for is_answer, markers, stops in typed:
        if is_answer and index < num_found:
            answers.append((index, stops))
        index += markers + int(is_answer)
    return answers
