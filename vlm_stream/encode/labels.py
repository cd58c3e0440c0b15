r"""Labels from the rendered text: each assistant turn with its stop token, and nothing else.

Enters: ids [S] of one sample, the text that was rendered for it, and the scaffold of the chat template. Leaves: labels
[S], IGNORE wherever nothing is to be learned. Typed control strings were taken out of the text before it was rendered,
so every chat token in the text was written by the template, and the n-th of them in the text is the n-th in the ids:

    text   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\nHello<|im_end|>\n
    chat   0                    1           2                           3
    ids    [0] user \n Hi      [1] \n     [2] assistant  \n\n  Hello  [3] \n
    label  .   .    .  .        .   .       .   .          *      *      *   .

A header's end may lie inside a token (here the template's newline and the answer's first one merged): a token that
holds any character of the answer is labelled. Media are one placeholder in the text and many tokens in the ids, so
text after a placeholder is looked for after the tokens of media.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vlm_stream.encode.chat_format import ChatFormat, Rendered
from vlm_stream.errors import BadSampleError
from vlm_stream.keys import IGNORE
from vlm_stream.tokens import Processor, tokenizer_of

_MAX_TAILS: Final = 256
_LONGEST_TAIL: Final = 64


def wants_training(conversation: Sequence[dict[str, Any]]) -> list[bool]:
    """Say for each assistant turn whether it is to be learned: `"train": false` and `"weight": 0` switch it off."""
    return [
        bool(message.get("train", True)) and message.get("weight", 1) != 0
        for message in conversation
        if message.get("role") == "assistant"
    ]


def label_answers(
    processor: Processor, chat: ChatFormat, rendered: Rendered, ids: npt.NDArray[np.int64], train: Sequence[bool]
) -> npt.NDArray[np.int64]:
    """Return labels [S] for the answers that are to be learned; placeholders of media are never labels."""
    ranges = _Places(processor, chat, rendered, ids).answers()
    if len(ranges) != len(train) and not all(train):
        raise BadSampleError(
            "encode",
            "label_mismatch",
            f"The template wrote {len(ranges)} answers for {len(train)} assistant turns, so 'train': false cannot be "
            "honoured.",
        )
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    for turn, (begin, end) in enumerate(ranges):
        if len(ranges) != len(train) or train[turn]:
            labels[begin:end] = ids[begin:end]
    for placeholder in chat.placeholders:
        labels[labels == placeholder] = IGNORE
    return labels


def has_labels(labels: npt.NDArray[np.int64]) -> bool:
    """Say whether anything is to be learned; IGNORE is below every id."""
    return len(labels) > 0 and int(labels.max()) != IGNORE


class _Places:
    """Where characters of a rendered text lie in its ids; chat tokens and media are the fixed points."""

    def __init__(self, processor: Processor, chat: ChatFormat, rendered: Rendered, ids: npt.NDArray[np.int64]) -> None:
        self._tokenizer = tokenizer_of(processor)
        self._chat, self._rendered, self._ids = chat, rendered, ids
        pieces = chat.chat_pattern.split(rendered.text) if chat.chat_pattern else [rendered.text]
        self._pieces = pieces  # the text; every second piece is a chat token
        self._mark_ids = [chat.chat_ids[mark] for mark in pieces[1::2]]
        self._positions = self._find_marks()  # where the chat tokens of the text lie in the ids
        self._mark_ends = list(accumulate(map(len, pieces)))[1::2]
        self._after_media: dict[int, int] = {}
        self._cursor = 0

    def answers(self) -> list[tuple[int, int]]:
        """Return begin and end of each answer in tokens."""
        spans = self._rendered.spans if self._rendered.spans is not None else self._answer_spans()
        return [(self._token_at(begin), self._answer_end(begin, end)) for begin, end in spans]

    def _find_marks(self) -> list[int]:
        written = self._mark_ids
        places = np.flatnonzero(np.isin(self._ids, list(self._chat.chat_ids.values())))
        found, positions = self._ids.take(places).tolist(), places.tolist()
        # a tokenizer may put a token of its own in front (bos) or at the end (eos).
        for skip in range(len(found) - len(written) + 1):
            if found[skip : skip + len(written)] == written:
                return list(positions[skip : skip + len(written)])
        raise BadSampleError(
            "encode",
            "label_mismatch",
            f"The text holds {len(written)} chat tokens and the ids hold {len(found)}: labels cannot be placed.",
        )

    def _answer_spans(self) -> list[tuple[int, int | None]]:
        """Return where answers begin; and where they end, for templates that write no token there."""
        chat, text = self._chat, self._rendered.text
        begins = self._header_ends()
        if chat.end_pattern is None:
            return [(begin, None) for begin in begins]
        last = len(text) - len(chat.closing) if text.endswith(chat.closing) else len(text)
        found = (chat.end_pattern.search(text, begin) for begin in begins)
        return [(b, match.start() if match else max(b, last)) for b, match in zip(begins, found, strict=True)]

    def _header_ends(self) -> list[int]:
        """Return for each answer where its header ends (its own last blanks count if they were written)."""
        chat, text = self._chat, self._rendered.text
        if chat.header_pattern is None:
            return []
        blanks = chat.header[len(chat.header.rstrip()) :]
        ends = [match.end() for match in chat.header_pattern.finditer(text)]
        return [end + len(blanks) if text.startswith(blanks, end) else end for end in ends]

    def _answer_end(self, begin: int, end: int | None) -> int:
        """Return the token after an answer; without `end`: after a stop token, before a chat token that is none."""
        if end is not None:
            return self._token_after(end)
        following = bisect_right(self._mark_ends, begin)
        if following >= len(self._positions):
            return len(self._ids)
        return self._positions[following] + (1 if self._mark_ids[following] in self._chat.stop_ids else 0)

    def _token_at(self, char: int) -> int:
        """Return the first token that holds the character or a later one."""
        after, tail = self._from_fixed_point(char)
        return after + self._count_inside(tail, after)

    def _token_after(self, char: int) -> int:
        """Return the first token that holds no character before `char`; a stop token there belongs to the answer."""
        after, tail = self._from_fixed_point(char)
        inside = self._count_inside(tail, after)
        is_whole = self._decode(after, after + inside) == tail
        end = after + inside + (0 if is_whole else 1)
        return end + 1 if end < len(self._ids) and int(self._ids[end]) in self._chat.stop_ids else end

    def _from_fixed_point(self, char: int) -> tuple[int, str]:
        """Return the position after the last chat token or medium before `char`, and the text from there to `char`."""
        mark = bisect_right(self._mark_ends, char) - 1
        text, begin = self._pieces[2 * mark + 2], self._mark_ends[mark] if mark >= 0 else 0
        media = list(self._chat.media_pattern.finditer(text)) if self._chat.media_pattern else []
        before = [medium.end() for medium in media if begin + medium.end() <= char]
        if not before:
            first = self._positions[mark] + 1 if mark >= 0 else self._count_added_in_front()
            return first, text[: char - begin]
        after = next((medium.start() for medium in media if medium.start() >= before[-1]), None)
        if begin + before[-1] not in self._after_media:
            at = self._find_after_medium(mark, text[before[-1] : after], is_last=after is None)
            self._after_media[begin + before[-1]] = at
        return self._after_media[begin + before[-1]], text[before[-1] : char - begin]

    def _count_added_in_front(self) -> int:
        """Return 1 where the tokenizer has put its first token before the text."""
        bos, bos_id = (getattr(self._tokenizer, name, None) for name in ("bos_token", "bos_token_id"))
        is_added = bos and len(self._ids) and int(self._ids[0]) == bos_id and not self._rendered.text.startswith(bos)
        return 1 if is_added else 0

    def _find_after_medium(self, mark: int, piece: str, *, is_last: bool) -> int:
        """Return where a piece of text begins that stands between two media, or between the last and a chat token.

        Processors may write text around media (timestamps), so a run of ids without media tokens is taken whose text
        holds the piece: the last run for the last piece, otherwise the first that was not taken before.
        """
        begin = self._positions[mark] + 1 if mark >= 0 else 0
        end = self._positions[mark + 1] if mark + 1 < len(self._positions) else len(self._ids)
        ids = self._ids[begin:end]
        media = begin + np.flatnonzero((ids < 0) | np.isin(ids, self._chat.media_ids))
        runs = np.stack([media + 1, np.append(media[1:], end)], axis=1)
        is_open = (runs[:-1, 0] < runs[:-1, 1]) & (runs[:-1, 0] >= self._cursor)
        runs = runs[-1:] if is_last else runs[:-1][is_open]
        for start, stop in runs.tolist():
            text = self._decode(start, stop)
            found = text.rfind(piece) if is_last else text.find(piece)
            if found >= 0 or is_last:  # a tokenizer may normalise what follows the last medium
                self._cursor = stop
                return int(start) + self._count_inside(text[: max(found, 0)], start)
        raise BadSampleError(
            "encode", "label_mismatch", "Text after a medium was not found in the ids: labels cannot be placed."
        )

    def _count_inside(self, tail: str, after: int) -> int:
        """Return how many tokens lie wholly inside `tail`, which begins with the token at `after`."""
        if not tail:
            return 0
        tails = self._chat.tails
        alone = tails.get(tail)
        if alone is None:
            alone = [int(token) for token in self._tokenizer(tail, add_special_tokens=False)["input_ids"]]
            # Headers end with the same few characters in every sample; answers do not come again.
            if len(tail) <= _LONGEST_TAIL and len(tails) < _MAX_TAILS:
                tails[tail] = alone
        present = self._ids[after : after + len(alone)].tolist()
        if present == alone:
            return len(alone)
        count = next((i for i, (a, b) in enumerate(zip(alone, present, strict=False)) if a != b), len(present))
        while count < len(present) and len(self._decode(after, after + count + 1)) <= len(tail):
            count += 1  # the same characters in other tokens
        return count

    def _decode(self, begin: int, end: int) -> str:
        ids = self._ids[begin:end].tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
