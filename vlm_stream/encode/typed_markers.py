"""Text that looks like a control token stays text.

A user may type `<|im_start|>assistant` or `<|image_pad|>`; a tokenizer would make control tokens of it, and with them a
turn that nobody took or an image that nobody sent. Before rendering, each such string is replaced by one private
character; after the processor has run, the tokens of that piece of text are replaced by the tokens of what was typed,
cut after its first character so that no control token can form. Text without such strings passes untouched, and its
ids are the processor's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.conversation import MEDIA_TYPES
from vlm_stream.encode.chat_format import ChatFormat, tokenizer_of
from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.conversation import Conversation

__all__ = ["TypedMarkers", "disguise", "splice_plain"]

_FIRST: Final = 0x10F000  # plane 16, private use: no font, no text and no vocabulary has it
_PRIVATE: Final = re.compile("[\U0010f000-\U0010ffff]")
_KEPT_KEYS: Final = frozenset({"role", "type", *MEDIA_TYPES})


@dataclass(slots=True)
class TypedMarkers:
    """The control strings that one conversation's texts hold, in the order of their private characters."""

    strings: list[str] = field(default_factory=list)

    def character(self, marker: str) -> str:
        """Return the private character that stands for the string."""
        if marker not in self.strings:
            self.strings.append(marker)
        return chr(_FIRST + self.strings.index(marker))


def disguise(conversation: Conversation, chat: ChatFormat) -> tuple[Conversation, TypedMarkers | None]:
    """Return the conversation with typed control strings replaced; the same object when there are none."""
    if chat.control is None:
        return conversation, None
    texts = _strings(conversation)
    whole = "".join(texts)
    for sign in chat.control_signs:  # a character is looked for much faster than a pattern, and most texts hold none
        if sign in whole:
            break
    else:
        return conversation, None
    _refuse_split_markers(conversation, chat.control)
    if not any(map(chat.control.search, texts)):
        return conversation, None
    if any(map(_PRIVATE.search, texts)):
        raise BadSampleError(
            "encode", "reserved_character", "The text holds control tokens and characters of U+10F000..U+10FFFF."
        )
    markers, control = TypedMarkers(), chat.control

    def replace(value: Any) -> Any:
        if isinstance(value, str):
            return control.sub(lambda match: markers.character(match.group()), value)
        if isinstance(value, dict):
            return {key: item if key in _KEPT_KEYS else replace(item) for key, item in value.items()}
        return [replace(item) for item in value] if isinstance(value, list) else value

    return replace(conversation), markers


def _refuse_split_markers(conversation: Conversation, control: re.Pattern[str]) -> None:
    """Raise where the texts of a turn hold a control string only together: templates write them side by side."""
    for message in conversation:
        content = message.get("content")
        items = content if isinstance(content, list) else []
        texts = [item.get("text") if isinstance(item, dict) and item.get("type") == "text" else None for item in items]
        for is_text, run in groupby(texts, key=lambda text: isinstance(text, str)):
            pieces = [str(text) for text in run]
            if (
                is_text
                and len(pieces) > 1
                and len(control.findall("".join(pieces))) > sum(len(control.findall(piece)) for piece in pieces)
            ):
                raise BadSampleError(
                    "encode",
                    "typed_markers",
                    "Texts of one turn spell a control token together, which would make a turn or a medium that nobody "
                    "sent. Join them into one text, which is then written as text.",
                )


def _strings(conversation: Conversation) -> list[str]:
    """Return all strings that may hold typed markers, in no order."""
    found: list[str] = []
    left: list[Any] = list(conversation)
    for value in left:  # it grows on the way
        if isinstance(value, dict):
            for key, item in value.items():
                if key not in _KEPT_KEYS:
                    (found if isinstance(item, str) else left).append(item)
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str):
            found.append(value)
    return found


def splice_plain(
    processor: Any, text: str, ids: npt.NDArray[np.int64], markers: TypedMarkers
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ids in which typed strings are plain text, and for each of them its old position (-1: it is new)."""
    tokenizer = tokenizer_of(processor)
    added = sorted(map(str, tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    pieces = re.split("|".join(map(re.escape, added)), text) if added else [text]
    out: list[npt.NDArray[np.int64]] = []
    origin: list[npt.NDArray[np.int64]] = []
    cursor = 0
    for piece in pieces:
        if not _PRIVATE.search(piece):
            continue
        begin, end = _find_piece(tokenizer, piece, ids, cursor)
        plain = _plain_ids(tokenizer, piece, markers)
        out += [ids[cursor:begin], plain]
        origin += [np.arange(cursor, begin), np.full(len(plain), -1)]
        cursor = end
    return np.concatenate([*out, ids[cursor:]]), np.concatenate([*origin, np.arange(cursor, len(ids))])


def _find_piece(tokenizer: Any, piece: str, ids: npt.NDArray[np.int64], cursor: int) -> tuple[int, int]:
    for form in (
        piece,
        piece.lstrip(),
        piece.rstrip(),
        piece.strip(),
    ):  # some control tokens swallow blanks beside them
        pattern = _encode(tokenizer, form)
        windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern)) if len(pattern) <= len(ids) else ids[:0]
        hits: Any = np.flatnonzero((windows[cursor:] == pattern).all(axis=-1)) if len(windows) else []
        if len(hits):
            return cursor + int(hits[0]), cursor + int(hits[0]) + len(pattern)
    raise BadSampleError(
        "encode",
        "typed_markers",
        "A text holds control tokens and this tokenizer does not let them be written as text.",
    )


def _plain_ids(tokenizer: Any, piece: str, markers: TypedMarkers) -> npt.NDArray[np.int64]:
    parts = [""]
    for character in re.split("([\U0010f000-\U0010ffff])", piece):
        if not _PRIVATE.fullmatch(character):
            parts[-1] += character
            continue
        marker = markers.strings[ord(character) - _FIRST]
        parts[-1] += marker[0]
        parts.append(marker[1:])
    return np.concatenate([_encode(tokenizer, part) for part in parts if part])


def _encode(tokenizer: Any, text: str) -> npt.NDArray[np.int64]:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
