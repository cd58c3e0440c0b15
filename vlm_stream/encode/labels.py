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
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.encode.chat_format import ChatFormat, Rendered, tokenizer_of
from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["IGNORE", "SEQUENCE_KEYS", "has_labels", "header_ends", "label_answers", "wants_training"]

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
    places = _Places(processor, chat, rendered, ids)
    ranges = places.answers()
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


def header_ends(chat: ChatFormat, text: str) -> list[int]:
    """Return for each answer in the text where its header ends (its own last blanks count if they were written)."""
    if chat.header_pattern is None:
        return []
    blanks = chat.header[len(chat.header.rstrip()) :]
    ends = [match.end() for match in chat.header_pattern.finditer(text)]
    return [end + len(blanks) if text.startswith(blanks, end) else end for end in ends]


class _Places:
    """Where the pieces of a rendered text lie in its ids; chat tokens are the fixed points."""

    def __init__(self, processor: Any, chat: ChatFormat, rendered: Rendered, ids: npt.NDArray[np.int64]) -> None:
        self._processor, self._chat, self._rendered, self._ids = processor, chat, rendered, ids
        text = rendered.text
        self._pieces = chat.chat_pattern.split(text) if chat.chat_pattern else [text]  # every second is a chat token
        self._mark_ids = [chat.chat_ids[mark] for mark in self._pieces[1::2]]
        self._positions = self._align(self._mark_ids)

    def answers(self) -> list[tuple[int, int]]:
        """Return begin and end of each answer in tokens."""
        if self._rendered.spans is None and self._chat.opener is not None and self._chat.end_pattern is None:
            return self._answers_after_openers(self._chat.opener)
        return self.answers_by_characters()

    def _answers_after_openers(self, opener: str) -> list[tuple[int, int]]:
        """Return the same for headers of one chat token and a text: these need no search and no counting."""
        header = self._chat.header[len(opener) :]
        solid = header.rstrip()
        found = []
        for mark, piece in enumerate(self._pieces[2::2]):
            if self._pieces[2 * mark + 1] == opener and piece.startswith(solid):
                after = self._positions[mark] + 1
                begin = after + self._tokens_inside(header if piece.startswith(header) else solid, after)
                found.append((begin, self._end_at(mark + 1)))
        return found

    def answers_by_characters(self) -> list[tuple[int, int]]:
        """Return the same for every template."""
        self._mark_ends = list(accumulate(map(len, self._pieces)))[1::2]
        spans = self._rendered.spans
        found = []
        for begin, end in self._answer_spans() if spans is None else spans:
            last_token = self._end_at(bisect_right(self._mark_ends, begin)) if end is None else self._token_after(end)
            found.append((self._token_at(begin), last_token))
        return found

    def _answer_spans(self) -> list[tuple[int, int | None]]:
        """Return where answers begin; and where they end, for templates that write no token there."""
        text, end_pattern = self._rendered.text, self._chat.end_pattern
        begins = header_ends(self._chat, text)
        if end_pattern is None:
            return [(begin, None) for begin in begins]
        nexts = (end_pattern.search(text, begin) for begin in begins)
        return [(begin, found.start() if found else len(text)) for begin, found in zip(begins, nexts, strict=True)]

    def _align(self, written: list[int]) -> list[int]:
        """Return the positions of the template's chat tokens in the ids."""
        places = self._chat.is_chat.take(self._ids, mode="clip").nonzero()[0]
        found, positions = self._ids.take(places).tolist(), places.tolist()
        if found and min(found) < 0:  # to `clip`, ids below 0 are 0
            positions = [position for position, token_id in zip(positions, found, strict=True) if token_id >= 0]
            found = [token_id for token_id in found if token_id >= 0]
        # A tokenizer may put a token of its own in front (bos) or behind (eos).
        for skip in range(len(positions) - len(written) + 1):
            if found[skip : skip + len(written)] == written:
                return positions[skip : skip + len(written)]
        raise BadSampleError(
            "encode",
            "label_mismatch",
            f"The text holds {len(written)} chat tokens and the ids hold {len(positions)}: labels cannot be placed.",
        )

    def _token_at(self, char: int) -> int:
        """Return the first token that holds the character or a later one."""
        after, tail = self._from_mark(char)
        return after + self._tokens_inside(tail, after)

    def _token_after(self, char: int) -> int:
        """Return the first token that holds no character before `char`; a stop token there belongs to the answer."""
        after, tail = self._from_mark(char)
        inside = self._tokens_inside(tail, after)
        is_whole = self._decode(self._ids[after : after + inside].tolist()) == tail
        end = after + inside + (0 if is_whole else 1)
        return end + 1 if end < len(self._ids) and int(self._ids[end]) in self._chat.stop_ids else end

    def _end_at(self, mark: int) -> int:
        """Return where an answer before this chat token ends: after it if it is a stop token; with the ids if none."""
        if mark >= len(self._positions):
            return len(self._ids)
        return self._positions[mark] + (1 if self._mark_ids[mark] in self._chat.stop_ids else 0)

    def _from_mark(self, char: int) -> tuple[int, str]:
        """Return the position after the last chat token before `char`, and the text from there to `char`."""
        mark = bisect_right(self._mark_ends, char) - 1
        if mark < 0:
            return 0, self._rendered.text[:char]
        return self._positions[mark] + 1, self._rendered.text[self._mark_ends[mark] : char]

    def _tokens_inside(self, tail: str, after: int) -> int:
        """Return how many tokens lie wholly inside `tail`, which begins with the token at `after`."""
        if not tail:
            return 0
        alone = self._encode(tail)
        ids = self._ids[after : after + len(alone)].tolist()
        if ids == alone:
            return len(alone)
        count = next((i for i, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), len(ids))
        while count < len(ids) and len(self._decode(ids[: count + 1])) <= len(tail):
            count += 1  # the same characters in other tokens
        return count

    def _encode(self, tail: str) -> list[int]:
        """Return the ids of a text; headers end with the same few characters in every sample, so these are kept."""
        known = self._chat.tails.get(tail)
        if known is None:
            known = [int(token) for token in tokenizer_of(self._processor)(tail, add_special_tokens=False)["input_ids"]]
            if len(tail) <= _LONGEST_TAIL and len(self._chat.tails) < _MAX_TAILS:
                self._chat.tails[tail] = known
        return known

    def _decode(self, ids: list[int]) -> str:
        tokenizer = tokenizer_of(self._processor)
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
