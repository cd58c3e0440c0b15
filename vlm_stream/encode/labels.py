r"""Labels from the rendered text: each assistant turn with its stop token, and nothing else.

Enters: ids [S] of one sample, the text that was rendered for it, and the scaffold of the chat template. Leaves: labels
[S], IGNORE wherever nothing is to be learned. Typed control strings were taken out of the text before it was rendered,
so every chat token in the text was written by the template, and the n-th of them in the text is the n-th in the ids:

    text   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\nHello<|im_end|>\n
    chat   0                    1           2                           3
    ids    [0] user \n Hi      [1] \n     [2] assistant  \n\n  Hello  [3] \n
    label  .   .    .  .        .   .       .   .          *      *      *   .

A header's end may lie inside a token (here the template's newline and the answer's first one merged): a token that
holds any character of the answer is labelled.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from vlm_stream.encode.chat_format import ChatFormat, Rendered, tokenizer_of
from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["IGNORE", "SEQUENCE_KEYS", "has_labels", "label_answers", "wants_training"]

IGNORE: Final = -100
_MAX_TAILS: Final = 256
_LONGEST_TAIL: Final = 64
SEQUENCE_KEYS: Final = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")
"""Tensors with one entry per token."""
_IGNORED: Final = np.full(32_768, IGNORE, dtype=np.int64)  # a copy of its beginning costs less than filling anew


def wants_training(conversation: Sequence[dict[str, Any]]) -> list[bool]:
    """Say for each assistant turn whether it is to be learned: `"train": false` and `"weight": 0` switch it off."""
    return [
        bool(message.get("train", True)) and message.get("weight", 1) != 0
        for message in conversation
        if message.get("role") == "assistant"
    ]


def label_answers(
    processor: Any, chat: ChatFormat, rendered: Rendered, ids: npt.NDArray[np.int64], train: Sequence[bool]
) -> npt.NDArray[np.int64]:
    """Return labels [S] for the answers that are to be learned.

    Raises:
        BadSampleError: When text and ids cannot be brought together, or when single turns are switched off and the
            template did not write one answer per assistant turn.
    """
    marks = _find_marks(chat, rendered.text, ids)
    if rendered.spans is None and chat.opener is not None and chat.end_pattern is None:
        ranges = _answers_after(chat.opener, processor, chat, marks, ids)
    else:
        ranges = _Places(processor, chat, rendered, marks, ids).answers()
    if len(ranges) != len(train) and not all(train):
        raise BadSampleError(
            "encode",
            "label_mismatch",
            f"The template wrote {len(ranges)} answers for {len(train)} assistant turns, so 'train': false cannot be "
            "honoured.",
        )
    length = len(ids)
    labels = _IGNORED[:length].copy() if length <= len(_IGNORED) else np.full(length, IGNORE, dtype=np.int64)
    for turn, (begin, end) in enumerate(ranges):
        if len(ranges) != len(train) or train[turn]:
            labels[begin:end] = ids[begin:end]
    return labels


def has_labels(labels: npt.NDArray[np.int64]) -> bool:
    """Say whether anything is to be learned; IGNORE is below every id."""
    return len(labels) > 0 and int(labels[labels.argmax()]) != IGNORE


class _Marks(NamedTuple):
    """The chat tokens of a rendered text."""

    pieces: list[str]
    """The text; every second piece is a chat token."""
    ids: list[int]
    positions: list[int]
    """Where these ids lie in those of the sample."""


def _find_marks(chat: ChatFormat, text: str, ids: npt.NDArray[np.int64]) -> _Marks:
    pieces = chat.chat_pattern.split(text) if chat.chat_pattern else [text]
    written = [chat.chat_ids[mark] for mark in pieces[1::2]]
    places = chat.is_chat.take(ids, mode="clip").nonzero()[0]
    found, positions = ids.take(places).tolist(), places.tolist()
    if found == written:
        return _Marks(pieces, written, positions)
    if found and min(found) < 0:  # to `clip`, ids below 0 are 0
        positions = [position for position, token_id in zip(positions, found, strict=True) if token_id >= 0]
        found = [token_id for token_id in found if token_id >= 0]
    # A tokenizer may put a token of its own in front (bos) or behind (eos).
    for skip in range(len(found) - len(written) + 1):
        if found[skip : skip + len(written)] == written:
            return _Marks(pieces, written, positions[skip : skip + len(written)])
    raise BadSampleError(
        "encode",
        "label_mismatch",
        f"The text holds {len(written)} chat tokens and the ids hold {len(found)}: labels cannot be placed.",
    )


def _answers_after(
    opener: str, processor: Any, chat: ChatFormat, marks: _Marks, ids: npt.NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Return begin and end of each answer in tokens, for headers of one chat token and a text.

    It is what `_Places` gives, without a second search of the text and without counting characters.
    """
    pieces, mark_ids, positions = marks
    header = chat.header[len(opener) :]
    solid = header.rstrip()
    opener_id = chat.chat_ids[opener]
    ends = [at + 1 if mark_id in chat.stop_ids else at for mark_id, at in zip(mark_ids, positions, strict=True)]
    ends.append(len(ids))
    found = []
    for mark, mark_id in enumerate(mark_ids):
        if mark_id == opener_id and (piece := pieces[2 * mark + 2]).startswith(solid):
            after = positions[mark] + 1
            tail = header if piece.startswith(header) else solid
            found.append((after + _tokens_inside(tail, after, ids, processor, chat), ends[mark + 1]))
    return found


def _tokens_inside(tail: str, after: int, ids: npt.NDArray[np.int64], processor: Any, chat: ChatFormat) -> int:
    """Return how many tokens lie wholly inside `tail`, which begins with the token at `after`."""
    if not tail:
        return 0
    alone = chat.tails.get(tail)
    if alone is None:
        alone = [int(token) for token in tokenizer_of(processor)(tail, add_special_tokens=False)["input_ids"]]
        # Headers end with the same few characters in every sample; answers do not come again.
        if len(tail) <= _LONGEST_TAIL and len(chat.tails) < _MAX_TAILS:
            chat.tails[tail] = alone
    present = ids[after : after + len(alone)].tolist()
    if present == alone:
        return len(alone)
    count = next((i for i, (a, b) in enumerate(zip(alone, present, strict=False)) if a != b), len(present))
    while count < len(present) and len(_decode(processor, present[: count + 1])) <= len(tail):
        count += 1  # the same characters in other tokens
    return count


def _decode(processor: Any, ids: list[int]) -> str:
    tokenizer = tokenizer_of(processor)
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class _Places:
    """Where characters of a rendered text lie in its ids; chat tokens are the fixed points."""

    def __init__(
        self, processor: Any, chat: ChatFormat, rendered: Rendered, marks: _Marks, ids: npt.NDArray[np.int64]
    ) -> None:
        self._processor, self._chat, self._rendered, self._ids = processor, chat, rendered, ids
        self._marks = marks
        self._mark_ends = list(accumulate(map(len, marks.pieces)))[1::2]

    def answers(self) -> list[tuple[int, int]]:
        """Return begin and end of each answer in tokens."""
        spans = self._rendered.spans if self._rendered.spans is not None else self._answer_spans()
        return [(self._token_at(begin), self._answer_end(begin, end)) for begin, end in spans]

    def _answer_end(self, begin: int, end: int | None) -> int:
        """Return the token after an answer; without `end`: after a stop token, before a chat token that is none."""
        if end is not None:
            return self._token_after(end)
        following = bisect_right(self._mark_ends, begin)
        if following >= len(self._marks.positions):
            return len(self._ids)
        return self._marks.positions[following] + (1 if self._marks.ids[following] in self._chat.stop_ids else 0)

    def _answer_spans(self) -> list[tuple[int, int | None]]:
        """Return where answers begin; and where they end, for templates that write no token there."""
        text, end_pattern = self._rendered.text, self._chat.end_pattern
        begins = self._header_ends()
        if end_pattern is None:
            return [(begin, None) for begin in begins]
        nexts = (end_pattern.search(text, begin) for begin in begins)
        return [(begin, found.start() if found else len(text)) for begin, found in zip(begins, nexts, strict=True)]

    def _header_ends(self) -> list[int]:
        """Return for each answer where its header ends (its own last blanks count if they were written)."""
        chat, text = self._chat, self._rendered.text
        if chat.header_pattern is None:
            return []
        blanks = chat.header[len(chat.header.rstrip()) :]
        ends = [match.end() for match in chat.header_pattern.finditer(text)]
        return [end + len(blanks) if text.startswith(blanks, end) else end for end in ends]

    def _token_at(self, char: int) -> int:
        """Return the first token that holds the character or a later one."""
        after, tail = self._from_mark(char)
        return after + _tokens_inside(tail, after, self._ids, self._processor, self._chat)

    def _token_after(self, char: int) -> int:
        """Return the first token that holds no character before `char`; a stop token there belongs to the answer."""
        after, tail = self._from_mark(char)
        inside = _tokens_inside(tail, after, self._ids, self._processor, self._chat)
        is_whole = _decode(self._processor, self._ids[after : after + inside].tolist()) == tail
        end = after + inside + (0 if is_whole else 1)
        return end + 1 if end < len(self._ids) and int(self._ids[end]) in self._chat.stop_ids else end

    def _from_mark(self, char: int) -> tuple[int, str]:
        """Return the position after the last chat token before `char`, and the text from there to `char`."""
        mark = bisect_right(self._mark_ends, char) - 1
        if mark < 0:
            return 0, self._rendered.text[:char]
        return self._marks.positions[mark] + 1, self._rendered.text[self._mark_ends[mark] : char]
