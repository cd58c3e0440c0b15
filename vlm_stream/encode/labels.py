"""Labels from the rendered text: each assistant turn with its stop token, and nothing else.

Enters: ids [S] of one sample, the text that was rendered for it, and the scaffold of the chat template. Leaves: labels
[S], IGNORE wherever nothing is to be learned. Typed control strings were taken out of the text before it was rendered,
so every chat token in the text was written by the template, and the n-th of them in the text is the n-th in the ids:

    text   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n\\nHello<|im_end|>\\n
    chat   0                    1           2                           3
    ids    [0] user \\n Hi      [1] \\n     [2] assistant  \\n\\n  Hello  [3] \\n
    label  .   .    .  .        .   .       .   .          *      *      *   .

A header's end may lie inside a token (here the template's newline and the answer's first one merged): a token that
holds any character of the answer is labelled.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.encode.chat_format import ChatFormat, tokenizer_of
from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["IGNORE", "header_ends", "label_answers", "wants_training"]

IGNORE: Final = -100


def wants_training(conversation: Sequence[dict[str, Any]]) -> list[bool]:
    """Say for each assistant turn whether it is to be learned: `"train": false` and `"weight": 0` switch it off."""
    turns = (message for message in conversation if message.get("role") == "assistant")
    return [bool(turn.get("train", True)) and turn.get("weight", 1) != 0 for turn in turns]


def label_answers(
    processor: Any, chat: ChatFormat, text: str, ids: npt.NDArray[np.int64], train: Sequence[bool]
) -> npt.NDArray[np.int64]:
    """Return labels [S] for the answers that are to be learned.

    Raises:
        BadSampleError: When text and ids cannot be brought together, or when single turns are switched off and the
            template did not write one answer per assistant turn.
    """
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    ends = header_ends(chat, text)
    if len(ends) != len(train) and not all(train):
        raise BadSampleError(
            "encode",
            "label_mismatch",
            f"The template wrote {len(ends)} answers for {len(train)} assistant turns, so 'train': false cannot be "
            "honoured.",
        )
    positions, marks = _align(chat, text, ids)
    starts = [mark.end() for mark in marks]
    for turn, end in enumerate(ends):
        if len(ends) == len(train) and not train[turn]:
            continue
        mark = bisect_left(starts, end + 1) - 1  # the last chat token that ends at or before the header's end
        after = int(positions[mark]) + 1 if mark >= 0 else 0
        tail = text[starts[mark] if mark >= 0 else 0 : end]
        begin = after + _tokens_before(processor, tail, ids[after:])
        until = _answer_end(chat, ids, positions, marks, mark + 1)
        labels[begin:until] = ids[begin:until]
    return labels


def header_ends(chat: ChatFormat, text: str) -> list[int]:
    """Return for each answer in the text where its header ends (its own last blanks count if they were written)."""
    if not chat.header:
        return []
    solid = chat.header.rstrip()
    blanks = chat.header[len(solid) :]
    ends = (match.end() for match in re.finditer(re.escape(solid), text))
    return [end + len(blanks) if text.startswith(blanks, end) else end for end in ends]


def _align(
    chat: ChatFormat, text: str, ids: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.intp], list[re.Match[str]]]:
    """Return the positions of the chat tokens in the ids, and the same tokens in the text."""
    marks = list(chat.chat_pattern.finditer(text)) if chat.chat_pattern else []
    positions = np.flatnonzero(np.isin(ids, list(chat.chat_ids.values())))
    written = np.asarray([chat.chat_ids[mark.group()] for mark in marks], dtype=np.int64)
    # A tokenizer may put a token of its own in front (bos) or behind (eos).
    for skip in range(len(positions) - len(written) + 1):
        window = positions[skip : skip + len(written)]
        if np.array_equal(ids[window], written):
            return window, marks
    raise BadSampleError(
        "encode",
        "label_mismatch",
        f"The text holds {len(written)} chat tokens and the ids hold {len(positions)}: labels cannot be placed.",
    )


def _tokens_before(processor: Any, tail: str, ids: npt.NDArray[np.int64]) -> int:
    """Return how many tokens lie wholly inside `tail`, which begins where the ids begin."""
    if not tail:
        return 0
    tokenizer = tokenizer_of(processor)
    alone = np.asarray(tokenizer(tail, add_special_tokens=False)["input_ids"], dtype=np.int64)
    length = min(len(alone), len(ids))
    same = alone[:length] == ids[:length]
    count = int(np.argmin(same)) if not same.all() else length
    if count == len(alone):
        return count
    while count < len(ids) and len(tokenizer.decode(ids[: count + 1].tolist(), **_VERBATIM)) <= len(tail):
        count += 1  # the same characters in other tokens
    return count


_VERBATIM: Final = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def _answer_end(
    chat: ChatFormat,
    ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.intp],
    marks: list[re.Match[str]],
    next_mark: int,
) -> int:
    """Return where an answer ends: after the stop token, or before a chat token that is none, or with the ids."""
    if next_mark >= len(marks):
        return len(ids)
    end = int(positions[next_mark])
    return end + 1 if int(ids[end]) in chat.stop_ids else end
